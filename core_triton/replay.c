/* Launches the kernels of a recorded call. replay.py makes the recording and describes it.

   A recording is an array of 64-bit words:

       constants, addresses, descriptors, launches      how many there are of each
       a word for each constant                         the value of a parameter, in the low bytes
       2 words for each address                         array, bytes from its start
       9 words for each TMA descriptor                  array, bytes from its start, dtype, swizzle, rows, columns,
                                                        bytes between rows, rows and columns of a block
       7 words for each launch                          function, three sizes of the grid, threads, bytes of shared
                                                        memory, parameters
       and a word for each of its parameters            its number: constants, addresses and descriptors are
                                                        numbered in one sequence, in this order

   The constants are read where they are. Each call has its own addresses and descriptors, so threads do not share them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

enum { ADDRESS_WORDS = 2, DESCRIPTOR_WORDS = 9, LAUNCH_WORDS = 7, MOST_PARAMETERS = 128, MAP_ALIGNMENT = 128 };

static struct {
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                       const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    CUresult (*error_string)(CUresult, const char **);
    CUresult (*current_context)(CUcontext *);
    CUresult (*set_context)(CUcontext);
    CUresult (*primary_context)(CUcontext *, CUdevice);
    CUresult (*device)(CUdevice *, int);
} driver;

/* load(path): uses the CUDA driver at this path. */
static PyObject *load(PyObject *self, PyObject *path) {
    const char *name = PyUnicode_AsUTF8(path);
    if (!name) return NULL;
    void *library = dlopen(name, RTLD_NOW);
    if (!library) return PyErr_Format(PyExc_OSError, "the CUDA driver cannot be loaded: %s", dlerror());
    struct { const char *name; void **function; } wanted[] = {
        {"cuLaunchKernelEx", (void **)&driver.launch},
        {"cuTensorMapEncodeTiled", (void **)&driver.encode},
        {"cuGetErrorString", (void **)&driver.error_string},
        {"cuCtxGetCurrent", (void **)&driver.current_context},
        {"cuCtxSetCurrent", (void **)&driver.set_context},
        {"cuDevicePrimaryCtxRetain", (void **)&driver.primary_context},
        {"cuDeviceGet", (void **)&driver.device},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!(*wanted[i].function = dlsym(library, wanted[i].name)))
            return PyErr_Format(PyExc_OSError, "the CUDA driver %s has no %s", name, wanted[i].name);
    Py_RETURN_NONE;
}

/* A thread that has not used CUDA has no context. Kernels run in the device's primary context, which PyTorch uses. */
static CUresult ensure_context(int ordinal) {
    CUcontext context;
    CUdevice device;
    CUresult error = driver.current_context(&context);
    if (error || context) return error;
    if ((error = driver.device(&device, ordinal))) return error;
    if ((error = driver.primary_context(&context, device))) return error;
    return driver.set_context(context);
}

static CUresult encode(CUtensorMap *map, const int64_t *words, uint64_t base) {
    cuuint64_t shape[] = {words[5], words[4]}, stride[] = {words[6]};  /* the innermost dimension first */
    cuuint32_t block[] = {words[8], words[7]}, step[] = {1, 1};
    return driver.encode(map, words[2], 2, (void *)(base + words[1]), shape, stride, block, step,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, words[3], CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

static CUresult run_all(const int64_t *words, const uint64_t *bases, CUtensorMap *maps, uint64_t *addresses, int ordinal,
                        CUstream stream) {
    int64_t constants = words[0], address_count = words[1], descriptors = words[2], launches = words[3];
    const int64_t *values = words += 4;
    words += constants;
    for (int64_t i = 0; i < address_count; i++, words += ADDRESS_WORDS) addresses[i] = bases[words[0]] + words[1];
    CUresult error = ensure_context(ordinal);
    for (int64_t i = 0; i < descriptors && !error; i++, words += DESCRIPTOR_WORDS)
        error = encode(&maps[i], words, bases[words[0]]);
    for (int64_t i = 0; i < launches && !error; i++) {
        void *parameters[MOST_PARAMETERS];
        const int64_t *numbers = words + LAUNCH_WORDS;
        for (int64_t p = 0; p < words[6]; p++) {
            int64_t number = numbers[p];
            if (number < constants) parameters[p] = (void *)&values[number];
            else if (number < constants + address_count) parameters[p] = &addresses[number - constants];
            else parameters[p] = &maps[number - constants - address_count];
        }
        CUlaunchConfig config = {.gridDimX = words[1], .gridDimY = words[2], .gridDimZ = words[3],
                                 .blockDimX = words[4], .blockDimY = 1, .blockDimZ = 1,
                                 .sharedMemBytes = words[5], .hStream = stream};
        error = driver.launch(&config, (CUfunction)words[0], parameters, NULL);
        words = numbers + words[6];
    }
    return error;
}

/* run(recording, bases, device, stream): enqueues all launches. `bases` has the address of each array, as an int. */
static PyObject *run(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "run takes recording, bases, device and stream");
    const char *bytes = PyBytes_AsString(arguments[0]);
    if (!bytes) return NULL;
    if (!PyList_Check(arguments[1])) return PyErr_Format(PyExc_TypeError, "bases must be a list of addresses");
    long ordinal = PyLong_AsLong(arguments[2]);
    unsigned long long stream = PyLong_AsUnsignedLongLong(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    const int64_t *words = (const int64_t *)bytes;
    Py_ssize_t arrays = PyList_GET_SIZE(arguments[1]);
    void *memory;
    if (posix_memalign(&memory, MAP_ALIGNMENT, words[2] * sizeof(CUtensorMap) + 8 * (words[1] + arrays)))
        return PyErr_NoMemory();
    CUtensorMap *maps = memory;
    uint64_t *addresses = (uint64_t *)(maps + words[2]), *bases = addresses + words[1];
    for (Py_ssize_t i = 0; i < arrays; i++) bases[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(arguments[1], i));
    if (PyErr_Occurred()) {
        free(memory);
        return NULL;
    }
    CUresult error;
    Py_BEGIN_ALLOW_THREADS;
    error = run_all(words, bases, maps, addresses, ordinal, (CUstream)stream);
    Py_END_ALLOW_THREADS;
    free(memory);
    if (error) {
        const char *text = NULL;
        driver.error_string(error, &text);
        return PyErr_Format(PyExc_RuntimeError, "CUDA error %d in a recorded call: %s", error, text ? text : "unknown");
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"load", load, METH_O, "load(path)"},
                                {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
                                 "run(recording, bases, device, stream)"},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "linear_ce_replay", NULL, -1, methods};

PyMODINIT_FUNC PyInit_linear_ce_replay(void) { return PyModule_Create(&definition); }
