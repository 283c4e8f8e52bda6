/* A CUDA driver that writes down what it is asked to launch, for tests of core_triton/replay.c without a GPU.

   A function's handle says what it takes: the number of parameters in the low byte, then a bit for each parameter that
   is a TMA descriptor. The log has, for each launch, handle, grid, threads, shared memory, stream and the parameters: a
   word each, ten words for a descriptor (address, dtype, rank, shape, stride, block, swizzle and the context). */

#include <cuda.h>
#include <stdint.h>
#include <string.h>

int64_t fake_log[4096];
int fake_words = 0;
int fake_error = 0;  /* returned by the next launch */
static _Thread_local CUcontext current = 0;

static void put(int64_t word) {
    if (fake_words < 4096) fake_log[fake_words++] = word;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    int64_t handle = (int64_t)function;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    if (fake_error) return fake_error;
    put(handle);
    put(config->gridDimX), put(config->gridDimY), put(config->gridDimZ);
    put(config->blockDimX), put(config->sharedMemBytes), put((int64_t)config->hStream);
    for (int i = 0; i < (handle & 255); i++)
        for (int word = 0; word < (handle >> (8 + i) & 1 ? 10 : 1); word++) put(((int64_t *)parameters[i])[word]);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *block,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    int64_t words[] = {(int64_t)address, dtype, rank, shape[0], shape[1], strides[0], block[0], block[1], swizzle,
                       (int64_t)current};
    memcpy(map, words, sizeof words);
    return (uintptr_t)map % 64 || steps[0] != 1 || steps[1] != 1 || interleave || fill ||
                   promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_128B
               ? CUDA_ERROR_INVALID_VALUE
               : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "an error of the fake driver";
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(uintptr_t)(1000 + device);
    return CUDA_SUCCESS;
}
