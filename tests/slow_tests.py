"""Tests that only `make test-slow` runs. A quicker test in `make test` covers the same code, or most of it.

`SLOW` maps each file to names of tests, or of single cases with their parameters. conftest.py marks them `slow`, and
raises an error for a name that does not exist in the file. Other tests are marked in their own file.
"""

import re
from collections.abc import Iterable

SLOW: dict[str, tuple[str, ...]] = {
    # These runs have the same steps and files as runs on plain text, whose resumption test_flax_resume.py compares
    # bitwise. test_examples.py covers dialogues and adapters.
    "test_flax_lora.py": (
        "test_the_first_output_is_the_base_models_bit_for_bit[bfloat16]",
        "test_a_run_reports_what_trains_resumes_bit_for_bit_and_evaluates_its_average",
        "test_a_cache_does_not_change_generated_tokens",
        # test_flax_peft.py checks merged weights against peft's formula.
        "test_a_merged_model_gives_the_results_of_the_adapters[lora0]",
        "test_frozen_parameters_are_stored_in_the_computation_dtype_and_give_the_same_bits[False]",
    ),
    "test_flax_dialogues.py": (
        "test_a_run_learns_answers_reports_packing_and_resumes_bit_for_bit",
        # test_flax_resume.py reports the texts of the batch of a loss that is not finite.
        "test_non_finite_loss_reports_the_examples_of_its_batch",
    ),
    "test_flax_freeze.py": (
        "test_a_frozen_head_saves_its_matmul_and_memory_and_changes_no_other_gradient",
        "test_a_run_reports_what_trains_and_resumes_with_it",
        # test_flax_lora.py checks frozen parameters beside adapters.
        "test_frozen_parameters_keep_their_bits_and_all_others_move[1]",
        "test_frozen_parameters_keep_their_bits_and_all_others_move[2]",
        "test_flops_are_the_matmuls_of_the_differentiated_model[config6-freeze6]",
    ),
    # test_flax_families.py compares losses and exports with transformers.
    "test_flax_finetune.py": (
        "test_the_first_steps_loss_is_that_of_transformers_on_its_batch",
        "test_an_exported_run_has_the_folders_files_and_is_the_same_model_in_transformers",
        # test_examples.py trains from a folder. test_flax_resume.py checks that resumption is bitwise equal.
        "test_resuming_does_not_need_the_folder_and_gives_the_uninterrupted_runs_results",
        "test_a_run_that_ended_before_its_first_checkpoint_restarts_from_the_folders_weights",
    ),
    "test_flax_model.py": (
        "test_what_is_kept_for_the_backward_pass[4]",
        "test_loops_and_recomputation_change_neither_results_nor_gradients",
        "test_tied_head_is_the_embedding_and_learns_from_both_ends",
        # test_flax_train.py and test_parity_train.py check the loss of a run, test_flax_generate.py generated tokens.
        "test_first_loss_is_near_uniform",
        "test_greedy_generation_reads_the_last_position_also_past_the_window",
    ),
    "test_flax_packing.py": (
        "test_cudnn_gets_the_positions_of_sequences",
        "test_one_sequence_per_row_equals_no_lengths",
        "test_packed_rows_give_the_gradients_of_padded_rows",
        "test_examples_do_not_see_each_other[gemma2]",
        "test_micro_batches_of_packed_rows_match_the_whole_batch",
        # Other tests check which examples a pass has, and test_flax_dialogues.py reports padding.
        "test_lengths_like_an_instruction_sets_leave_little_padding",
    ),
    "test_flax_generate.py": (
        "test_a_chat_prints_the_answers_to_prompts_in_the_template",
        "test_draws_have_the_expected_probabilities",
        "test_the_cache_changes_no_token[longrope]",
        # test_examples.py runs the command.
        "test_the_command_prints_every_prompt_with_its_continuation[run]",
        "test_extending_in_pieces_gives_the_hidden_states_of_the_whole",
        "test_rows_are_independent",
        "test_draws_repeat_with_their_key_and_rows_draw_independently",
        # test_examples.py runs the command on a run, and the other tests read weights.
        "test_the_command_prints_every_prompt_with_its_continuation[weights]",
    ),
    "test_flax_accounting.py": (
        "test_memory_of_a_step_is_its_state_and_the_temporaries_that_xla_plans",
        "test_a_step_that_does_not_fit_is_reported_before_anything_runs_or_is_written[False]",
        # test_flax_train.py's run prints the same line.
        "test_a_run_compiles_its_step_once",
        "test_a_backend_without_memory_analysis_gives_none",
    ),
    "test_flax_train.py": (
        "test_micro_batches_make_the_gradients_of_the_whole_batch",
        "test_nothing_in_a_step_waits_for_the_device",
        "test_no_throughput_is_reported_for_a_model_that_does_not_learn",
        "test_loss_of_a_step_is_that_of_materialized_logits_over_counted_tokens[1]",
        "test_a_known_peak_gives_the_utilization",
        # test_no_head_is_transposed in test_jax_pallas_transforms.py checks this for the loss.
        "test_head_is_never_transposed_into_a_copy",
        "test_a_cast_head_gives_the_same_loss_and_a_rounded_gradient",
        # test_wheel.py imports the installed package where only its requirements are.
        "test_model_needs_neither_the_command_lines_libraries_nor_torch",
    ),
    # The other example also runs the trainer through its functions.
    "test_examples.py": (
        "test_pretrain_text_learns_writes_a_model_and_prints_the_next_commands",
        # The test of the first updates runs the same example.
        "test_grpo_records_its_runs_and_draws_them",
    ),
    "test_benchmarks_train.py": ("test_the_unfused_trainer_differs_only_in_the_loss",),
    "test_parity.py": ("test_the_command_compares_both_frameworks",),
    # A sum has the same plan as a mean.
    "test_jax_pallas_transforms.py": (
        "test_vmap_over_tokens[none]",
        "test_donated_arrays_become_their_gradients[bfloat16]",
        "test_gradient_of_each_single_argument[linear_bias-none]",
        "test_gradient_of_each_single_argument[linear_weight-none]",
        "test_gradient_of_each_single_argument[input-linear_weight-none]",
        "test_gradient_of_each_single_argument[linear_weight-linear_bias-none]",
        "test_gradient_of_each_single_argument[input-log_probs]",
        "test_gradient_of_each_single_argument[linear_bias-log_probs]",
        "test_gradient_of_each_single_argument[input-linear_bias-log_probs]",
        "test_gradient_of_each_single_argument[linear_weight-linear_bias-log_probs]",
        "test_jit[65536-none]",
        "test_jit[None-none]",
        "test_results_are_bitwise_repeatable[log_probs]",
        "test_checkpoint[False-none]",
        "test_checkpoint[True-log_probs]",
        "test_checkpoint[False-log_probs]",
        "test_scan_over_micro_batches[False-none]",
        "test_vmap_keeps_no_head_gradient_for_each_element[none]",
        "test_second_axis_as_vocabulary[none]",
        "test_gradient_of_each_single_argument[input-sum]",
        "test_gradient_of_each_single_argument[linear_weight-sum]",
        "test_gradient_of_each_single_argument[linear_bias-sum]",
        "test_gradient_of_each_single_argument[input-linear_weight-sum]",
        "test_gradient_of_each_single_argument[input-linear_bias-sum]",
        "test_gradient_of_each_single_argument[linear_weight-linear_bias-sum]",
        "test_vmap_over_tokens[sum]",
        "test_vmap_keeps_no_head_gradient_for_each_element[sum]",
        "test_jit[None-sum]",
        "test_jit[65536-sum]",
        "test_results_are_bitwise_repeatable[sum]",
        "test_results_are_bitwise_repeatable[none]",
        "test_scan_over_micro_batches[True-none]",
        "test_checkpoint[False-sum]",
        "test_checkpoint[True-sum]",
        "test_second_axis_as_vocabulary[sum]",
        "test_gradient_of_each_single_argument[linear_weight-log_probs]",
        "test_gradient_of_each_single_argument[input-linear_bias-mean]",
        "test_gradient_of_each_single_argument[linear_weight-linear_bias-mean]",
        "test_gradient_of_each_single_argument[input-linear_weight-linear_bias-sum]",
        "test_scan_over_micro_batches[False-mean]",
        "test_checkpoint[True-none]",
        "test_vmap_over_tokens[entropy]",
        "test_gradient_of_each_single_argument[input-linear_weight-log_probs]",
        "test_gradient_of_each_single_argument[input-linear_weight-mean]",
        "test_jit[65536-log_probs]",
        # vocab_axis is an option of the tables in test_jax_pallas_numeric.py.
        "test_second_axis_as_vocabulary[mean]",
        "test_second_axis_as_vocabulary[log_probs]",
        "test_checkpoint[False-mean]",
        "test_vmap_keeps_no_head_gradient_for_each_element[entropy]",
        # Evaluation of a mean and of log-probabilities, and the other dtypes of an unreduced loss remain.
        "test_without_a_gradient_there_is_one_matmul[sum]",
        "test_without_a_gradient_there_is_one_matmul[none]",
        "test_no_head_is_transposed[float32-sum]",
        "test_no_head_is_transposed[bfloat16-sum]",
        "test_no_head_is_transposed[float32-log_probs]",
        "test_no_head_is_transposed[float32-none]",
        "test_no_head_is_transposed[bfloat16-mean]",
        "test_gradient_of_each_single_argument[input-linear_bias-none]",
        # Two other tests map over tokens too.
        "test_vmap_over_tokens[mean]",
    ),
    "test_jax_pallas_edges.py": (
        "test_results_stay_float32_where_jax_has_64_bits[float32-12-none]",
        "test_results_stay_float32_where_jax_has_64_bits[float32-12-mean]",
        "test_results_stay_float32_where_jax_has_64_bits[float32-12-sum]",
        "test_results_stay_float32_where_jax_has_64_bits[float16-12-sum]",
        "test_results_stay_float32_where_jax_has_64_bits[float16-12-none]",
        "test_results_stay_float32_where_jax_has_64_bits[float16-12-log_probs]",
        "test_all_targets_ignored[0.0-sum]",
        "test_all_targets_ignored[nan-sum]",
        "test_all_targets_ignored[inf-sum]",
        "test_zero_denominator_or_weights[options1]",
        # Every option and dtype that takes a separate path through the log-probabilities keeps a quick case.
        "test_results_stay_float32_where_jax_has_64_bits[float32-12-log_probs]",
        # Each result, differentiated argument and dtype remains with others.
        *(
            f"test_a_row_of_nan_whose_upstream_gradient_is_0_changes_no_gradient[{results}-{names}-{dtype}]"
            for i, results in enumerate((("loss",), ("log_prob",), ("log_prob", "entropy", "lse")))
            for j, names in enumerate((("input", "linear_weight", "linear_bias"), ("input",), ("linear_weight",)))
            for k, dtype in enumerate(("float32", "bfloat16", "float16"))
            if (i + j + k) % 3 != 1
        ),
    ),
    # One shape with several chunks represents the others.
    "test_jax_pallas_memory.py": (
        # A mean of more rows remains.
        "test_temporaries_within_budget[train-(1, 8, 50)-none]",
        "test_temporaries_within_budget[train-(257, 32, 300)-none]",
        "test_many_tokens_within_budget[none]",
        "test_frozen_arguments_within_budget[input-mean]",
        "test_frozen_arguments_within_budget[linear_weight-none]",
        "test_a_batch_by_vmap_within_budget[none]",
        "test_temporaries_within_budget[evaluate-(257, 32, 300)-mean]",
        *(
            f"test_temporaries_within_budget[train-{case}]"
            for case in (
                "(1, 8, 50)-mean",
                "(1, 8, 50)-log_probs",
                "(3, 64, 501)-mean",
                "(3, 64, 501)-none",
                "(3, 64, 501)-log_probs",
                "(2000, 64, 1001)-none",
                "(2000, 64, 1001)-log_probs",
            )
        ),
        *(
            f"test_temporaries_within_budget[evaluate-{shape}-{function}]"
            for shape in ("(1, 8, 50)", "(3, 64, 501)", "(2000, 64, 1001)")
            for function in ("mean", "none", "log_probs")
        ),
        "test_temporaries_within_budget[evaluate-(257, 32, 300)-none]",
        "test_default_budget_at_a_models_shape[mean-1]",
        "test_default_budget_at_a_models_shape[mean-1000]",
        "test_default_budget_at_a_models_shape[none-1]",
        "test_default_budget_at_a_models_shape[none-65536]",
        # The other functions and shapes in this file check training.
        "test_temporaries_within_budget[train-(257, 32, 300)-log_probs]",
        "test_temporaries_within_budget[train-(2000, 64, 1001)-mean]",
        "test_default_budget_at_a_models_shape[none-1000]",
        "test_temporaries_within_budget[evaluate-(257, 32, 300)-log_probs]",
        "test_many_tokens_within_budget[mean]",
        "test_frozen_arguments_within_budget[input-none]",
        "test_the_error_names_the_smallest_budget[sum]",
        "test_the_error_names_the_smallest_budget[none]",
        # test_jax_pallas_transforms.py checks that a batch keeps no gradient of the head for each element.
        "test_a_batch_by_vmap_within_budget[mean]",
    ),
    # Mosaic's interpreter is slow, so the quick suite runs one shape for each branch of each kernel.
    "test_jax_pallas_hopper_logits.py": (
        "test_sums_without_stored_exponentials[deep-0]",
        "test_d_logits[vocab_chunk-True]",
        "test_statistics[vocab_chunk]",
        "test_statistics_of_masked_classes",
        "test_d_logits[transposed vocab_chunk-False]",
        # Every case of test_d_logits also has NaN in rows that do not contribute.
        "test_rows_that_do_not_contribute_may_hold_nan",
        # The split head, of which only the device knows the number of classes, remains, and so does the whole head.
        "test_exponentials[counted]",
        "test_exponentials[split]",
        # Classes that padding masks remain, and test_d_logits has NaN in rows.
        "test_masked_classes_and_rows_of_nan",
    ),
    "test_jax_pallas_hopper_gradients.py": (
        "test_d_weight_of_a_vocab_chunk[37-0]",
        "test_d_weight[few steps-0.5]",
        "test_d_input[split]",
        # The transposed case also has several parts and a partial last step.
        "test_d_weight[many steps-None]",
        # bfloat16 has the same sums, and the other tests of a float32 d_weight have its stores.
        "test_d_weight_that_one_kernel_starts_and_adds_to[0-float32]",
        "test_d_weight_that_is_added_to_float32[many steps]",
        # Heads in bfloat16 have these ways too.
        "test_d_input_of_a_float32_head[tails]",
        # With the other latency the late programs have fewer tiles too.
        "test_programs_that_begin_late_leave_tiles_to_others[20000.0]",
        # The sums of a float32 head have the same schedule, and the number of classes of a device.
        "test_d_input_sums[split-False]",
    ),
    "test_jax_pallas_recompute.py": (
        "test_every_plan_by_triton_kernels[none]",
        # Another case of this test runs the same plan with other options.
        "test_every_plan_by_triton_kernels[recomputed-smoothing]",
        "test_every_plan_by_triton_kernels[exponentials-cap-dv]",
        *(
            f"test_every_plan_by_triton_kernels[exponentials-fp16-{name}]"
            for name in ("cap", "repaired", "frozen", "sharp", "sharp-none", "smoothing")
        ),
        # The case of float16 has chunks too.
        "test_every_plan_by_triton_kernels[exponentials-chunks]",
    ),
    # The remaining case has every option. test_jax_pallas_kernels.py tests the other axis.
    "test_jax_pallas_shards.py": ("test_shards_by_triton_kernels[fp32]", "test_shards_by_triton_kernels[transposed]"),
    "test_jax_pallas_export.py": (
        "test_one_program_for_a_cpu_and_a_gpu[log_probs]",
        "test_a_named_implementation_is_lowered_for_a_gpu[mosaic]",
        # The kernels for an A100 and for a B200 are the same.
        "test_a_gpu_gets_its_kernels[NVIDIA B200]",
        # A program whose saved rows belong to one platform is lowered for both too, and each platform has a test.
        "test_one_program_for_a_cpu_and_a_gpu[mean]",
    ),
    # This test starts two processes. The other tests of the file also check that the frameworks agree, and test the
    # command's output with fake runs.
    "test_parity_train.py": (
        "test_the_command_trains_in_both_frameworks",
        # Another test catches another rotation.
        "test_a_different_setting_in_one_framework_is_caught[rope_theta]",
    ),
    # Both frameworks share the harness's modes, three of which run with PyTorch.
    "test_benchmarks.py": (
        "test_every_mode_runs_end_to_end[jax]",
        "test_every_mode_runs_end_to_end[torch]",
        "test_sharp_logits_show_what_rounded_logits_cost[jax-float32-logits-rounded-gradient-rounded1]",
        # The tests of objectives run JAX's methods too.
        "test_random_targets_and_float32[jax]",
    ),
    # The harness's modes also run with PyTorch.
    "test_benchmarks_host.py": ("test_host_time_of_jax",),
    # XLA and ptxas take half a minute. test_jax_pallas_export.py lowers the same kernels, and checks shapes and
    # layouts.
    "test_jax_pallas_gpu_compile.py": (
        "test_mosaic_compiles_and_fits",
        # test_jax_pallas_float32_matmuls.py runs this kernel in NumPy.
        "test_float32_matmuls_compile_and_scaled_logits_fit[0]",
    ),
    # flax_models needs what jax_pallas needs, and more.
    "test_wheel.py": ("test_an_installed_package_is_imported_where_only_its_requirements_are[jax_pallas]",),
    # Both frameworks share the sweep, and its other tests run JAX.
    "test_benchmarks_sweep.py": (
        "test_chunked_has_nothing_to_sweep[jax]",
        # Both frameworks share what parses and records options and fits rows.
        "test_a_sweep_sets_every_option_that_measuring_reads[jax]",
        "test_rows_are_measured_and_fitted[jax]",
        # Two tests check the rows of each count in JAX, and the plan of a program of such rows.
        "test_jax_compiles_a_program_for_each_row_count[plan]",
    ),
    # Importing peft takes ten seconds.
    "test_flax_peft.py": (
        "test_peft_gives_the_same_outputs_gradients_and_merged_weights",
        "test_the_files_are_those_that_peft_writes",
        "test_a_run_starts_from_what_peft_has_written",
    ),
    # The remaining cases also have padded heads.
    "test_jax_pallas_properties.py": (
        "test_vocabulary_shards_give_the_whole_loss[7-sizes2-12-1-3-options2-False-1]",
        "test_vocabulary_shards_give_the_whole_loss[7-sizes1-0-7-40-options1-True-1]",
    ),
    # The test that compares bitwise resumes too, at another step.
    "test_flax_resume.py": (
        "test_resuming_a_finished_run_takes_no_step_and_reports_again_with_moved_texts",
        # One way to damage a checkpoint represents the others.
        "test_an_older_checkpoint_replaces_a_damaged_one[<lambda>-its checksum is another]",
        "test_an_older_checkpoint_replaces_a_damaged_one[<lambda>-is missing]",
        "test_a_checkpoint_without_its_manifest_is_still_read",
        # The other signal has the same handler.
        "test_second_signal_kills_the_process[2]",
        # Two tests of a full disk do not train, and a run that is stopped by a signal is resumed too.
        "test_full_disk_is_one_line_and_the_run_can_be_resumed",
        # One damaged checkpoint is reported and set aside in the same way.
        "test_if_all_checkpoints_are_damaged_each_is_reported_and_kept",
    ),
    # Other families use every switch of these families. test_examples.py exports a folder and reads it.
    "test_flax_families.py": (
        "test_hidden_states_and_loss_are_those_of_transformers[phi3-long]",
        "test_hidden_states_and_loss_are_those_of_transformers[mistral]",
        "test_hidden_states_and_loss_are_those_of_transformers[gemma]",
        "test_an_exported_run_is_the_same_model_in_transformers",
    ),
    # Only muon could mistake stacked layers for one array.
    "test_flax_optimizers.py": (
        "test_each_layer_is_updated_like_a_separate_array_in_optax[adafactor]",
        "test_each_layer_is_updated_like_a_separate_array_in_optax[schedule_free_adamw]",
        # bfloat16 has the same code.
        "test_16_bit_gradients_are_clipped_by_their_float32_norm[float16]",
    ),
    "test_jax_pallas_sign.py": (
        # The first passes of "chunked" are merged by the same function.
        "test_shards_of_the_vocabulary[pallas_triton]",
        # The accuracy tests also check that losses of confident tokens with this dtype and these options are not
        # negative.
        "test_the_loss_is_never_below_zero[bfloat16-plain-none-chunked]",
        "test_the_loss_is_never_below_zero[bfloat16-plain-none-pallas_triton]",
        # The other functions, options and dtypes of this loss remain by the kernels, and these in "chunked".
        "test_the_loss_is_never_below_zero[float32-scaled-mean-pallas_triton]",
        # By the kernels the gradient of a confident token remains, and in test_jax_pallas_shard_rows.py its loss.
        "test_confident_tokens_are_as_accurate_as_from_float32_logits[pallas_triton-plain]",
        # test_jax_pallas_kernels.py checks which rows are repaired, and "chunked" has the signs of their losses.
        "test_repaired_rows[pallas_triton]",
    ),
    # The same operators with other options run in the quick suite.
    "test_core_triton_transforms.py": (
        # With fullgraph=True the same checks raise, and a level of forward mode is refused without it.
        "test_compiled_transforms_are_refused[False]",
        # The functions that a mean consists of are compiled one by one too.
        "test_a_compiled_call_works_after_one_that_was_wrong[log_probs]",
        "test_a_compiled_call_works_after_one_that_was_wrong[token_loss]",
    ),
    "test_core_triton_compile.py": (
        # Log-probabilities with saved rows remain, and a mean, whose gradients are scaled.
        "test_compiled_autograd_runs_the_backward_pass_of_an_eager_call[none-options0]",
        "test_compiled_autograd_runs_the_backward_pass_of_an_eager_call[none-options1]",
        "test_compiled_autograd_runs_the_backward_pass_of_an_eager_call[log_probs-options0]",
        "test_opcheck[options1-dtype0]",
        # A mean and log-probabilities remain, and an unreduced loss of a model.
        "test_functions_compile_without_graph_breaks[sum]",
        "test_functions_compile_without_graph_breaks[none]",
        "test_dynamic_shapes_compile_once[none]",
        # Dynamic shapes are compiled once with the default backend too.
        "test_dynamic_shapes_with_aot_autograd",
    ),
    # test_jax_pallas_sharded.py has devices without tokens, two axes of tokens and float32.
    "test_jax_pallas_scale.py": (
        "test_on_several_devices[tokens, no token]",
        "test_on_several_devices[tokens, two axes]",
        "test_on_several_devices[tokens, float32]",
    ),
    # The mean remains on other meshes.
    "test_jax_pallas_sharded.py": (
        "test_on_several_devices[vocabulary and fsdp, tokens: mean]",
        # test_jax_pallas_inputs.py has integers of every width. One that JAX would wrap remains, and ignore_index.
        "test_targets_of_the_host_are_not_wrapped_to_32_bits[9223372036854775808-uint64]",
        "test_targets_of_the_host_are_not_wrapped_to_32_bits[-5-int64]",
    ),
    # The interpreter of Pallas takes most of the time. The kernel of float32 matmuls remains.
    "test_jax_pallas_in_numpy.py": ("test_results_are_those_of_the_interpreter_of_pallas[exponentials]",),
    # The quick suite checks each function and each check_vma setting, but not every pair.
    "test_jax_pallas_sharding.py": (
        # "explicit axes" of test_jax_pallas_sharded.py divides both by D, and its case "vocabulary: smoothing" has
        # weights of tokens.
        "test_the_types_say_how_arrays_are_divided[input-spec6]",
        "test_the_types_say_how_arrays_are_divided[linear_weight-spec7]",
        "test_the_types_say_how_arrays_are_divided[token_weight-spec5]",
        "test_on_several_devices[sum, checked]",
        "test_on_several_devices[none, checked]",
        "test_on_several_devices[log_probs, checked]",
        "test_on_several_devices[mean, unchecked]",
        "test_on_several_devices[none, plain jit]",
        "test_on_several_devices[replicated, kernels]",
    ),
    # sm_100 uses the same kernels as sm_80.
    "test_core_triton_kernels.py": (
        # Compute capability 12.0 runs the kernels of 8.9, which other tests compile for 8.9 with these steps.
        "test_a_launch_of_each_kernel_compiles_fits_and_overlaps[120-bf16]",
        "test_a_multiprocessor_runs_two_programs_of_the_ampere_kernels[120-32-3]",
        # Three cases remain, one with the same share.
        "test_d_weight_is_loaded_or_added_in_l2[0-late0]",
        # Another test compiles the kernels of sm_89 that differ from those of sm_80, and checks the same of them.
        "test_a_launch_of_each_kernel_compiles_fits_and_overlaps[89-bf16]",
        # Compute capability 8.6 runs the instructions of 8.9. The other layout of the head runs for 8.0.
        "test_gradients_for_compute_capability_8_take_either_head[89-86-False]",
        "test_gradients_for_compute_capability_8_take_either_head[89-86-True]",
        "test_gradients_for_compute_capability_8_take_either_head[89-89-False]",
        "test_gradients_for_compute_capability_8_take_either_head[90-90-False]",
        "test_a_launch_of_each_kernel_compiles_fits_and_overlaps[100-bf16]",
        "test_every_kernel_is_launched[100]",
        "test_every_kernel_is_launched[89]",
        # Compute capability 8.0 and 8.6 each run one of the two calls.
        "test_pieces_for_compute_capability_8_move_16_bytes_at_a_time"
        "[80-80-{'plan': 'stats', 'softcap': 30.0, 'transposed': True}]",
        "test_pieces_for_compute_capability_8_move_16_bytes_at_a_time[89-86-{'bias': True}]",
        "test_pieces_for_compute_capability_8_move_16_bytes_at_a_time[90-90-{'bias': True}]",
        # Other tests compile each of these kernels for compute capability 8.9, with the same step and stages.
        "test_a_multiprocessor_runs_two_programs_of_the_ampere_kernels[89-32-3]",
        "test_gradients_for_compute_capability_8_take_either_head[80-80-True]",
        "test_gradients_for_compute_capability_8_take_either_head[90-90-True]",
        "test_pieces_for_compute_capability_8_move_16_bytes_at_a_time"
        "[90-90-{'plan': 'stats', 'softcap': 30.0, 'transposed': True}]",
        # A quick test checks that these kernels are compiled for compute capability 8.0.
        "test_kernels_for_compute_capability_8_keep_their_instructions_on_hopper",
        # Each compute capability and each head remains.
        "test_workspace_of_rows_that_kernels_cannot_read_is_within_budget[80-head1]",
        "test_workspace_of_rows_that_kernels_cannot_read_is_within_budget[90-None]",
        # The calls of each plan have smoothing too.
        "test_workspace_of_many_tokens_is_within_budget[0.1-512 MiB]",
    ),
    # The kernels get a broadcast bias like any other array. The quick suite tests one in "chunked".
    "test_jax_pallas_layouts.py": ("test_a_bias_that_is_broadcast[pallas_triton]",),
    # The quick suite runs the same kernels with another axis or dtype.
    "test_jax_pallas_kernels.py": (
        "test_add_target_rows[bfloat16-1]",
        "test_vmap_runs_elements_one_after_the_other",
    ),
    # The quick suite exports a symbolic axis in float32.
    "test_jax_pallas_symbolic.py": (
        "test_a_symbolic_batch_in_float16",
        # A loss with statistics has the same symbolic axis and more results.
        "test_any_number_of_tokens[log_probs-numbers0]",
    ),
    # One case for each kind of loss, and the operators with and without saved statistics.
    "test_core_triton_token_loss.py": (
        "test_a_named_loss_compiles_without_graph_breaks[none-float32-ppo_clip]",
        # A loss with the entropy and the KL divergence remains.
        "test_a_named_loss_compiles_without_graph_breaks[mean-float16-ppo_clip]",
        "test_a_named_loss_compiles_without_graph_breaks[sum-bfloat16-ppo_clip]",
        "test_a_named_loss_compiles_without_graph_breaks[sum-bfloat16-grpo-k2-entropy]",
        "test_a_named_loss_compiles_without_graph_breaks[mean-float16-grpo-k2-entropy]",
        "test_statistics_compile_without_graph_breaks[mean-token_loss0]",
        "test_statistics_compile_without_graph_breaks[none-token_loss1]",
    ),
    "test_core_triton_saved.py": (
        "test_opcheck[needs_grad0-0]",
        "test_opcheck[needs_grad1-0]",
        "test_opcheck[needs_grad1-100]",
        "test_opcheck[needs_grad2-100]",
        "test_saved_rows_compile_without_graph_breaks[12-log_probs]",
        "test_saved_rows_compile_without_graph_breaks[700-none]",
        # A loss of rows has the same operators as log-probabilities.
        "test_saved_rows_compile_without_graph_breaks[12-none]",
    ),
    # Of token losses the quick suite has each option, reduction, dtype and function at least once, but not every pair.
    # test_symbolic_number_of_tokens_is_not_used also traces what is elementwise. The log-probabilities that are
    # compared bitwise have gradients by kernels in chunks.
    "test_jax_pallas_token_loss.py": (
        "test_losses[mean-focal-entropy]",
        "test_losses[mean-reinforce]",
        "test_losses[none-focal]",
        "test_options_in_chunks[grpo-k3-float32-0-{'softcap': 3.0, 'logit_scale': 0.7, 'vocab_size': 290}]",
        "test_options_in_chunks[grpo-k3-float32-1-{'softcap': 3.0, 'logit_scale': 0.7, 'vocab_size': 290, "
        "'reduction': 'sum'}]",
        "test_options_in_chunks[grpo-k3-bfloat16-0-{'normalizer': 7.0}]",
        "test_options_in_chunks[grpo-k3-float16-0-{'normalizer': 7.0}]",
        "test_kernels_of_a_loss_of_the_entropy[bfloat16-options0-0]",
        # Tests of cases have the counts and the values of the same gradients with the other reduction.
        "test_gradients_that_are_not_needed_are_not_computed[mean-]",
        "test_gradients_that_are_not_needed_are_not_computed[mean-per_token]",
        "test_gradients_that_are_not_needed_are_not_computed[mean-input]",
        "test_gradients_that_are_not_needed_are_not_computed[mean-linear_weight]",
        "test_gradients_that_are_not_needed_are_not_computed[none-]",
        "test_gradients_that_are_not_needed_are_not_computed[none-input]",
        "test_gradients_that_are_not_needed_are_not_computed[none-input-per_token]",
        "test_matmuls_of_a_loss_of_the_entropy[names0-mean-3]",
        "test_matmuls_of_a_loss_of_the_entropy[names3-none-3]",
        "test_matmuls_of_a_loss_of_the_entropy[names4-mean-1]",
        # One line makes the row NaN for every implementation.
        "test_a_log_prob_that_is_nan_makes_the_row_nan[pallas_triton-bfloat16-input]",
        "test_log_prob_of_confident_tokens_is_0[sum-bfloat16]",
        "test_log_prob_of_confident_tokens_is_0[none-float32]",
        "test_each_statistic_alone_is_as_among_all[log_prob-mean]",
        "test_each_statistic_alone_is_as_among_all[entropy-none]",
        "test_each_statistic_alone_is_as_among_all[lse-mean]",
        "test_each_statistic_alone_is_as_among_all[argmax-none]",
        "test_each_statistic_alone_is_as_among_all[is_top1-mean]",
        "test_each_statistic_alone_is_as_among_all[mean_logit-none]",
        "test_each_statistic_alone_is_as_among_all[sum_squared_probs-mean]",
        "test_statistics_have_no_gradient[options1]",
        "test_vmap[mean-False-False]",
        "test_vmap[mean-False-True]",
        "test_vmap[mean-True-True]",
        "test_vmap[none-False-True]",
        "test_scan_and_checkpoint[mean-False]",
        "test_symbolic_number_of_tokens[True]",
        "test_what_is_elementwise_runs[functions]",
        "test_what_is_elementwise_runs[selection]",
        "test_what_is_elementwise_runs[casts]",
        "test_what_is_elementwise_runs[calls]",
        "test_what_is_elementwise_runs[sum that is not used]",
        "test_what_is_elementwise_runs[no tokens]",
        # The upstream gradient of each argument remains with one reduction.
        "test_gradients_that_are_not_needed_are_not_computed[none-input-linear_weight-per_token]",
        "test_gradients_that_are_not_needed_are_not_computed[none-per_token]",
        "test_statistics_have_no_gradient[options0]",
        "test_vmap[none-False-False]",
        "test_options_in_chunks[focal-entropy-float32-1-{'softcap': 3.0, 'logit_scale': 0.7, 'vocab_size': 290, "
        "'reduction': 'sum'}]",
        "test_a_log_prob_that_is_nan_makes_the_row_nan[chunked-float32-input]",
        "test_scan_and_checkpoint[none-False]",
        "test_log_prob_of_confident_tokens_is_0[sum-float32]",
        "test_gradients_that_are_not_needed_are_not_computed[mean-input-per_token]",
        "test_matmuls_of_a_loss_of_the_entropy[names2-mean-2]",
        "test_what_is_elementwise_runs[sum in a derivative of the closure]",
        "test_named_losses_as_arguments[checkpoint]",
        "test_a_rule_that_changed_is_compiled_again[float]",
        # Each statistic, each reduction and each argument remains with others, and test_jax_pallas_transforms.py maps
        # over the head.
        "test_each_statistic_alone_is_as_among_all[entropy-mean]",
        "test_gradients_that_are_not_needed_are_not_computed[none-linear_weight]",
        "test_vmap_over_the_head",
    ),
    "test_jax_pallas_saved.py": (
        # Cases of the same upstream gradients run by the same kernels.
        "test_upstream_gradients_of_very_different_sizes[input-linear_weight]",
        "test_vmap[rows-log_probs]",
        "test_vmap[head-none]",
        "test_a_part_of_the_rows_is_saved[log_probs-float16]",
        "test_saved_rows_take_three_matmuls[input-linear_weight-log_probs]",
        "test_saved_rows_take_three_matmuls[input-none]",
        "test_saved_rows_take_three_matmuls[linear_weight-log_probs]",
        "test_memory_is_within_both_budgets[none-700]",
        "test_memory_is_within_both_budgets[log_probs-257]",
        "test_checkpoint[log_probs]",
        "test_the_smallest_budget_is_that_of_all_passes[none-float16-sizes6-options6]",
        "test_vmap[head-log_probs]",
        "test_memory_is_within_both_budgets[log_probs-700]",
        "test_saved_rows_take_three_matmuls[input-log_probs]",
        # Both gradients together have these matmuls.
        "test_saved_rows_take_three_matmuls[linear_weight-none]",
    ),
    # The d_weight of float16 has the same kernel, and a factor. A whole call with a float32 head has the same kernels.
    "test_jax_pallas_first_chunk.py": (
        "test_d_weight[bfloat16-384]",
        "test_d_weight[float32-192]",
        "test_d_input[float32]",
    ),
    # Each reduction, budget and dtype remains, and each function.
    "test_jax_pallas_grad_into.py": (
        "test_micro_batches_add_up_in_a_scan[float32-None-none]",
        "test_micro_batches_add_up_in_a_scan[float32-60000-mean]",
        "test_micro_batches_add_up_in_a_scan[float32-60000-none]",
        "test_micro_batches_add_up_in_a_scan[bfloat16-None-mean]",
        "test_micro_batches_add_up_in_a_scan[bfloat16-None-none]",
        "test_micro_batches_add_up_in_a_scan[bfloat16-60000-mean]",
        "test_micro_batches_add_up_in_a_scan[float16-None-mean]",
        "test_micro_batches_add_up_in_a_scan[float16-None-none]",
        "test_with_and_without_differentiation_the_sum_is_the_same[0]",
        "test_no_second_array[float32-none]",
        "test_no_second_array[bfloat16-mean]",
        "test_the_gradient_of_the_array_is_the_new_sum[frozen0-none]",
        "test_the_gradient_of_the_array_is_the_new_sum[frozen1-log_probs]",
        "test_the_gradient_of_the_array_is_the_new_sum[frozen2-none]",
        "test_options_and_padding_and_rows_that_do_not_contribute[0]",
        "test_unreduced_token_losses_have_it[False]",
        "test_checkpoint_and_vmap_of_rows[log_probs]",
        "test_micro_batches_add_up_in_a_scan[float16-60000-none]",
        "test_no_second_array[bfloat16-none]",
        "test_without_differentiation_the_call_evaluates[log_probs]",
        "test_the_gradient_of_the_array_is_the_new_sum[frozen1-none]",
    ),
    "test_jax_pallas_head_precision.py": (
        # The plans of a mean and of a sum are the same, and those of losses and of log-probabilities.
        "test_input_is_the_default[sum]",
        "test_input_is_the_default[none]",
        "test_transforms[0]",
        "test_d_input_takes_both_halves_and_float32_rows_of_targets[0]",
        # test_jax_pallas_token_loss.py has a token loss of a split head by the same kernels.
        "test_kernels_store_the_exponentials_of_a_split_head",
        "test_input_is_the_default[log_probs]",
    ),
    "test_jax_pallas_float16.py": (
        "test_fit[None-mosaic]",
        "test_fit[scales1-pallas_triton]",
        "test_fit[None-first chunk]",
        "test_each_row_is_placed_by_an_estimate_of_its_own_lse[0-None]",
        "test_each_row_is_placed_by_an_estimate_of_its_own_lse[1-300]",
        "test_the_terms_of_label_smoothing_have_the_scales_of_the_gradients[0]",
    ),
    "test_benchmarks_objectives.py": (
        # The references of JAX are compared with float64, and PyTorch's also with a weight that is rounded.
        "test_a_float32_head_rounds_to_the_weight[jax]",
        # The other tests of objectives run JAX's methods, and PyTorch runs every objective.
        "test_every_objective_runs_end_to_end[jax-methods1]",
        # The checks are those of PyTorch's methods, and two tests compare the references that JAX's methods have.
        "test_wrong_objectives_are_found[jax-benchmarks.jax_methods-of_jax]",
    ),
    "test_benchmarks_scale_out.py": (
        # Both frameworks share the command. PyTorch also measures other libraries.
        "test_rows_are_measured_on_two_cpus[jax]",
    ),
    "test_jax_pallas_numeric.py": (
        # Each option keeps a case of each dtype, but not each pair of options.
        "test_case[none-fp16-smoothing-zloss-softcap-scale-padded-bias-weight-signed-skewed-ignored-axis1-tight-upstream-"
        "nostats-head32-strided-n123]",
        "test_case[token_loss-grpo-k2-entropy-mean-bf16-softcap-scale-ignored-mask-n4x63]",
        "test_case[token_loss-weighted_nll-mean-fp16-n123]",
        "test_case[log_probs-fp16-bias-ignored-tight-head32-strided-n4x63]",
        "test_case[log_probs-fp16-padded-bias-skewed-ignored-axis1-tight-n50]",
        "test_case[edge-token_loss-stats-logits80-bf16]",
        # The other means and sums have these options, and another edge has a class that is masked.
        "test_stored_logits_of_all_classes[mean-fp32-softcap-scale-weight-normalizer-axis1-tight-nostats-strided-n50-80]",
        "test_stored_logits_of_all_classes[mean-fp32-softcap-scale-weight-normalizer-axis1-tight-nostats-strided-n50-90]",
        "test_stored_logits_of_all_classes[edge-masked_vocabulary-tight-fp32-80]",
        "test_stored_logits_of_all_classes[edge-masked_vocabulary-tight-fp32-90]",
        # Each case has one of the two tilings, and each tiling has losses of one function and of another.
        "test_stored_logits_of_all_classes[mean-fp32-smoothing-zloss-scale-weight-mask-ignored-tight-strided-n4x63-80]",
        "test_stored_logits_of_all_classes[sum-fp32-smoothing-softcap-weight-signed-axis1-upstream-nostats-strided-n4x63"
        "-90]",
        "test_stored_logits_of_all_classes[token_loss-cispo-mean-fp32-softcap-scale-bias-ignored-tokens16-n123-80]",
        "test_stored_logits_of_all_classes[edge-nan_masked-none-fp32-90]",
        "test_stored_logits_of_all_classes[edge-log_probs-nan_input-fp32-80]",
    ),
    "test_benchmarks_compare.py": (
        # The other tests of this file compare stand-ins, and those of the harness check results of both frameworks.
        "test_two_folders_are_checked_and_timed_alternately",
    ),
    "test_benchmarks_compile_ahead.py": (
        # test_benchmarks_sweep.py compiles programs ahead too, and these programs give the same bits.
        "test_rows_use_programs_that_were_compiled_ahead[compile_here]",
        # test_benchmarks_sweep.py compiles the programs of all rows ahead, and checks that they are those of the rows.
        "test_programs_of_other_processes_give_the_same_bits[1]",
    ),
    "test_benchmarks_same_launches.py": (
        # The other tests compare the steps of programs of JAX too.
        "test_steps_of_a_program_of_jax_are_its_kernels",
    ),
    "test_benchmarks_sm80.py": (
        # Another test compiles this kernel for Hopper too.
        "test_the_kernel_of_pallas_for_an_a100_accumulates_in_its_matmul[90]",
    ),
    "test_pages.py": (
        # Another test runs the programs of PyTorch, and test_sequence_losses.py the losses of sequences in JAX.
        "test_python_of_the_pages_runs[objectives.md]",
    ),
    "test_hosts_jax.py": (
        # Each version of Tunix and each setting remains, and each layer of Linen.
        # Explicit sharding remains for both, and other tests run without axes.
        "test_on_several_devices[automatic sharding]",
        "test_on_several_devices[MaxText, automatic sharding]",
        "test_loss_fn_of_tunix_has_the_results_of_its_default[False-None-0.1.7-OldTunixModel]",
        "test_loss_fn_of_tunix_has_the_results_of_its_default[True-5.0-0.1.8-TunixModel]",
        "test_patch_of_tunix_computes_its_chunked_log_probabilities[False-None-1.0]",
        "test_a_head_of_linen_has_the_loss_and_gradients_of_its_logits[layer0-True]",
        "test_a_head_of_linen_has_the_loss_and_gradients_of_its_logits[layer1-False]",
        "test_a_head_of_linen_has_the_loss_and_gradients_of_its_logits[layer2-True]",
    ),
    "test_jax_pallas_promotion.py": (
        # Each dtype, each function and one program with kernels remain.
        "test_programs_with_kernels[token_loss]",
        "test_compiled_calls_of_a_batch[token_losses]",
        "test_calls_have_the_programs_that_they_have_by_default[options-float16]",
        "test_calls_have_the_programs_that_they_have_by_default[softcap-bfloat16]",
        "test_calls_have_the_programs_that_they_have_by_default[token_losses-bfloat16]",
    ),
    "test_core_triton_memory.py": (
        # The other tests of this file have each dtype, function and option.
        "test_drawn_problems_within_budget[25]",
    ),
    "test_flax_chat.py": (
        # The other tests of this file compare the texts that count for each kind of template.
        "test_every_byte_of_an_answer_counts",
    ),
    "test_apart.py": (
        # The mark "apart" is for tests on a GPU, which `pytest -m gpu` runs.
        "test_tests_that_run_apart_have_their_outcomes",
    ),
    "test_benchmarks_floor.py": (
        # The frameworks share what is padded, not the matmuls: only slow tests run JAX's padded ones. The other dtype
        # of d_logits remains with JAX.
        "test_the_padded_floor_runs_the_matmuls_of_the_padded_weight[jax]",
        "test_d_logits_of_the_floor_do_not_underflow[bfloat16-0.010416666666666666-jax]",
    ),
    "test_benchmarks_hosts.py": (
        # Tunix has the same rows, and test_hosts_jax.py patches MaxText.
        "test_rows_of_jax_hosts[maxtext]",
    ),
}


def is_slow(file: str, name: str) -> bool:
    """Returns whether `SLOW` names a test of a file, or all of its cases."""
    return bool({name, re.sub(r"\[.*", "", name)} & {*SLOW.get(file, ())})


def unknown(file: str, names: Iterable[str]) -> set[str]:
    """Returns the names that `SLOW` has for a file but that do not exist in it."""
    existing = {form for name in names for form in (name, re.sub(r"\[.*", "", name))}
    return {*SLOW.get(file, ())} - existing
