"""Tests that only `make test-slow` runs. A quicker test in `make test` covers the same code.

By file: names of tests, or of single cases of a test with their parameters. conftest.py gives them the mark `slow`, and
raises an error for a name that no test of the file has. Tests that have the mark in their own file take even longer.
"""

import re
from collections.abc import Iterable

SLOW: dict[str, tuple[str, ...]] = {
    # The same steps and files as a run of plain text, whose resumption test_flax_resume.py compares bitwise. Rows of
    # dialogues and adapters: test_examples.py.
    "test_flax_lora.py": (
        "test_the_first_output_is_the_base_models_to_the_bit[bfloat16]",
        "test_a_run_says_what_trains_goes_on_to_the_bit_and_is_judged_by_its_average",
        "test_a_cache_changes_nothing_that_is_drawn",
        # Merged weights, by peft's formula: test_flax_peft.py.
        "test_a_merged_model_gives_what_the_adapters_give[lora0]",
        "test_what_stays_frozen_is_kept_in_the_computations_dtype_and_gives_the_same_bits[False]",
    ),
    "test_flax_dialogues.py": ("test_a_run_learns_answers_says_how_rows_are_filled_and_goes_on_to_the_bit",),
    "test_flax_freeze.py": (
        "test_a_frozen_head_spares_its_product_and_its_memory_and_changes_no_other_gradient",
        "test_a_run_says_what_trains_and_goes_on_with_it",
        # Beside adapters: test_flax_lora.py.
        "test_frozen_parameters_keep_their_bits_and_all_others_move[1]",
        "test_frozen_parameters_keep_their_bits_and_all_others_move[2]",
        "test_flops_are_the_products_of_the_differentiated_model[config6-freeze6]",
    ),
    # Losses and exports against transformers: test_flax_families.py.
    "test_flax_finetune.py": (
        "test_the_first_steps_loss_is_that_of_transformers_on_its_batch",
        "test_an_exported_run_has_the_folders_files_and_is_the_same_model_in_transformers",
        # Training that starts from a folder: test_examples.py; bitwise equal resumption: test_flax_resume.py.
        "test_resuming_needs_the_folder_no_more_and_gives_what_the_uninterrupted_run_gives",
        "test_a_run_that_ended_before_its_first_checkpoint_begins_again_with_the_folders_weights",
    ),
    "test_flax_model.py": (
        "test_what_is_kept_for_the_backward_pass[4]",
        "test_loops_and_recomputation_change_neither_results_nor_gradients",
        "test_tied_head_is_the_embedding_and_learns_from_both_ends",
        # Of a run: test_flax_train.py and test_parity_train.py; of drawn tokens: test_flax_generate.py.
        "test_first_loss_is_near_uniform",
        "test_generation_of_the_likeliest_token_reads_the_last_position_past_the_window_too",
    ),
    "test_flax_packing.py": (
        "test_cudnn_is_told_where_sequences_lie",
        "test_one_sequence_a_row_is_what_no_lengths_are",
        "test_packed_rows_train_to_the_gradients_of_padded_ones",
        "test_examples_do_not_see_each_other[gemma2]",
        "test_micro_batches_of_packed_rows_are_the_whole_batch",
    ),
    "test_flax_generate.py": (
        "test_a_chat_prints_the_answers_to_prompts_in_the_template",
        "test_draws_have_the_probabilities_of_the_rule",
        "test_the_cache_changes_no_token[longrope]",
        # The command: test_examples.py.
        "test_the_command_prints_every_prompt_with_what_follows[run]",
        "test_extending_in_pieces_gives_the_hidden_states_of_the_whole",
        "test_no_row_knows_of_the_others",
        "test_draws_repeat_with_their_key_and_rows_draw_for_themselves",
    ),
    "test_flax_accounting.py": (
        "test_memory_of_a_step_is_its_state_and_what_xla_plans_beside_it",
        "test_a_step_that_does_not_fit_is_told_before_anything_runs_or_is_made[False]",
        # What is printed is a line of test_flax_train.py's run.
        "test_a_run_compiles_its_step_once",
        "test_nothing_is_known_of_a_backend_that_does_not_plan",
    ),
    "test_flax_train.py": (
        "test_micro_batches_make_the_gradients_of_the_whole_batch",
        "test_nothing_in_a_step_waits_for_the_device",
        "test_no_throughput_of_a_model_that_does_not_learn",
        "test_loss_of_a_step_is_that_of_materialized_logits_over_counted_tokens[1]",
        "test_a_known_peak_gives_a_share_of_it",
        # Of the loss: test_no_head_is_transposed in test_jax_pallas_transforms.py.
        "test_head_is_never_transposed_into_a_copy",
        "test_a_cast_head_gives_the_same_loss_and_a_rounded_gradient",
    ),
    # The trainer by its own functions: the other example.
    "test_examples.py": ("test_pretrain_text_learns_writes_a_model_and_says_what_next",),
    "test_benchmarks_train.py": ("test_the_unfused_trainer_differs_in_the_loss_alone",),
    "test_parity.py": ("test_the_command_compares_both_frameworks",),
    # A sum has the plan of a mean.
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
        # An option of the tables: test_jax_pallas_numeric.py.
        "test_second_axis_as_vocabulary[mean]",
        "test_second_axis_as_vocabulary[log_probs]",
        "test_checkpoint[False-mean]",
        "test_vmap_keeps_no_head_gradient_for_each_element[entropy]",
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
        # The options and dtypes that have their own ways through a loss of log-probabilities have one here.
        "test_results_stay_float32_where_jax_has_64_bits[float32-12-log_probs]",
    ),
    # One shape of several chunks stands for the others.
    "test_jax_pallas_memory.py": (
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
        # Training is held to it by the other functions and shapes here.
        "test_temporaries_within_budget[train-(257, 32, 300)-log_probs]",
        "test_temporaries_within_budget[train-(2000, 64, 1001)-mean]",
        "test_default_budget_at_a_models_shape[none-1000]",
        "test_temporaries_within_budget[evaluate-(257, 32, 300)-log_probs]",
        "test_many_tokens_within_budget[mean]",
        "test_frozen_arguments_within_budget[input-none]",
    ),
    # Mosaic's interpreter: one shape for each kernel and each of its branches.
    "test_jax_pallas_hopper_logits.py": (
        "test_sums_without_stored_exponentials[deep]",
        "test_d_logits[vocab_chunk-True]",
        "test_statistics[vocab_chunk]",
        "test_statistics_of_masked_classes",
        "test_d_logits[transposed vocab_chunk-False]",
        # NaN of rows that do not contribute are also in every case of test_d_logits.
        "test_rows_that_do_not_contribute_may_hold_nan",
    ),
    "test_jax_pallas_hopper_gradients.py": (
        "test_d_weight_of_a_vocab_chunk[37-0]",
        "test_d_weight[few steps-True]",
        "test_d_input[split]",
        # Parts and a partial last step are also in the transposed case.
        "test_d_weight[many steps-False]",
    ),
    "test_jax_pallas_recompute.py": (
        "test_every_plan_by_triton_kernels[none]",
        # Other options of a plan that another case here runs.
        "test_every_plan_by_triton_kernels[recomputed-smoothing]",
        "test_every_plan_by_triton_kernels[exponentials-cap-dv]",
    ),
    # Every option in one case; the other axis: test_jax_pallas_kernels.py.
    "test_jax_pallas_shards.py": ("test_shards_by_triton_kernels[fp32]", "test_shards_by_triton_kernels[transposed]"),
    "test_jax_pallas_export.py": (
        "test_one_program_for_a_cpu_and_a_gpu[log_probs]",
        "test_a_named_implementation_is_lowered_for_a_gpu[mosaic]",
    ),
    # Two processes; the frameworks agree in this one too, and what the command says is tested with runs made up.
    "test_parity_train.py": ("test_the_command_trains_in_both_frameworks",),
    # JAX's methods also run in test_random_targets_and_float32; the modes are the harness's, for both frameworks.
    "test_benchmarks.py": ("test_every_mode_runs_end_to_end[jax-others1]",),
    # The same: the harness's modes are run with PyTorch.
    "test_benchmarks_host.py": ("test_host_time_of_jax",),
    # Half a minute of XLA and ptxas; test_jax_pallas_export.py lowers the same kernels, and checks shapes and layouts.
    "test_jax_pallas_gpu_compile.py": ("test_mosaic_compiles_and_fits",),
    # To import peft takes ten seconds.
    "test_flax_peft.py": (
        "test_peft_gives_the_same_outputs_gradients_and_merged_weights",
        "test_the_files_are_those_that_peft_writes",
        "test_a_run_starts_from_what_peft_has_written",
    ),
    # Another padded head.
    "test_jax_pallas_properties.py": (
        "test_vocabulary_shards_give_the_whole_loss[7-sizes2-12-1-3-options2-False-1]",
        "test_vocabulary_shards_give_the_whole_loss[7-sizes1-0-7-40-options1-True-1]",
    ),
    # Resumption at another step than in the test that compares bitwise.
    "test_flax_resume.py": (
        "test_resuming_a_finished_run_takes_no_step_and_reports_again_wherever_the_text_lies",
        # One way to break a checkpoint stands for the others.
        "test_an_older_checkpoint_takes_the_place_of_a_broken_one[<lambda>-its checksum is another]",
        "test_an_older_checkpoint_takes_the_place_of_a_broken_one[<lambda>-is missing]",
        "test_a_checkpoint_without_its_list_of_files_is_read_all_the_same",
    ),
    # Families whose every switch another family has; export: test_examples.py writes and reads a folder.
    "test_flax_families.py": (
        "test_hidden_states_and_loss_are_those_of_transformers[phi3-long]",
        "test_hidden_states_and_loss_are_those_of_transformers[mistral]",
        "test_hidden_states_and_loss_are_those_of_transformers[gemma]",
        "test_an_exported_run_is_the_same_model_in_transformers",
    ),
    # muon is the one whose layers could be mistaken for one array.
    "test_flax_optimizers.py": (
        "test_each_layer_moves_as_the_library_moves_an_array_of_its_own[adafactor]",
        "test_each_layer_moves_as_the_library_moves_an_array_of_its_own[schedule_free_adamw]",
    ),
    "test_jax_pallas_sign.py": (
        # The same merge of what the kernels' first passes leave.
        "test_shards_of_the_vocabulary[chunked]",
        # Confident tokens of the same dtype and options have losses of at least 0 too.
        "test_the_loss_is_never_below_zero[bfloat16-plain-none-chunked]",
        "test_the_loss_is_never_below_zero[bfloat16-plain-none-pallas_triton]",
    ),
    # The other options of the same operators.
    "test_core_triton_compile.py": ("test_opcheck[options1-dtype0]",),
    # Checks of replication and of the functions in turn stand for all pairs of them.
    "test_jax_pallas_sharding.py": (
        "test_on_several_devices[sum, checked]",
        "test_on_several_devices[none, checked]",
        "test_on_several_devices[log_probs, checked]",
        "test_on_several_devices[mean, unchecked]",
        "test_on_several_devices[none, plain jit]",
        "test_on_several_devices[replicated, kernels]",
    ),
    # The kernels of sm_80.
    "test_core_triton_kernels.py": (
        "test_a_launch_of_each_kernel_compiles_fits_and_overlaps[100-bf16]",
        "test_every_kernel_is_launched[100]",
    ),
    # Any other array; a bias that is broadcast reaches "chunked" every day.
    "test_jax_pallas_layouts.py": ("test_a_bias_that_is_broadcast[pallas_triton]",),
    # The other axis, dtype or a call of one kernel more.
    "test_jax_pallas_kernels.py": (
        "test_add_target_rows[bfloat16-1]",
        "test_vmap_runs_one_after_the_other",
    ),
    # A symbolic axis of float32 is exported every day.
    "test_jax_pallas_symbolic.py": (
        "test_a_symbolic_batch_in_float16",
        # A loss with its statistics has the same symbolic axis, and more results.
        "test_any_number_of_tokens[log_probs-numbers0]",
    ),
}


def is_slow(file: str, name: str) -> bool:
    """Returns whether `SLOW` has a test of a file, or all cases of it."""
    return bool({name, re.sub(r"\[.*", "", name)} & {*SLOW.get(file, ())})


def unknown(file: str, names: Iterable[str]) -> set[str]:
    """Returns the names in `SLOW` for a file that none of its tests has."""
    existing = {form for name in names for form in (name, re.sub(r"\[.*", "", name))}
    return {*SLOW.get(file, ())} - existing
