"""Tests that only ``make test-all`` runs: ``make test`` sees the same faults by smaller cases.

Per file, names of tests as pytest prints them behind ``::``; ``*`` stands for any characters, so
that a pattern with brackets leaves out some of a test's cases. ``python -m tools.mutation_check``
shows that the rest sees planted faults of every area, and ``tests/test_full_only.py`` that each
pattern matches a test and that every test left out in part keeps a case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

# families whose parts are those of others
ALIKE = (
    "bitnet", "cwm", "exaone", "gpt_neo", "granite_swa", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "iquestcoder", "jais2", "kimi_k2", "lfm2_moe", "lfm3", "mellum", "mistral4", "olmo",
    "persimmon", "phimoe", "sarvam_mla", "sarvam_moe", "youtu",
)  # fmt: skip
FURTHER_ENGINES_OF_FAULTS = (
    "*bfloat16-*",
    *(f"*-float32-{recipe}]" for recipe in ("int8", "fp8", "int4", "smoothquant", "rptq")),
)

FULL_ONLY: Mapping[str, Sequence[str]] = {
    # further dtypes, sizes and launch configs of kernels, and compilations of CUDA variants
    "tests/ops/test_implementations.py": ("*-triton-cpu-float16]", "*-triton-cpu-bfloat16]"),
    "tests/ops/test_recurrence.py": (
        "test_the_division_*-triton]",
        "test_a_snapshot_is_the_state_behind_its_tokens[*-triton]",
        "test_a_snapshot_between_chunks_changes_no_bit[triton]",
        "test_decodes_of_a_batch_are_those_of_single_sequences[*-triton]",
        "test_the_place_of_a_chunk_in_a_step_changes_no_bit*",
    ),
    "tests/ops/test_fused_moe.py": (
        "test_biases_and_gates_are_those_of_the_plain_mixture[*-mxfp4]",
        "test_groups_are_ranked_by_their_best_scores[1]",
    ),
    "tests/ops/test_local_experts.py": (
        "test_the_ranks_sum_is_the_whole_mixture[run_in_triton-3-*",
    ),
    "tests/parallel/test_expert_parallel.py": (
        "test_families_over_ranks_equal_the_whole[*-2]",
        "test_families_over_ranks_equal_the_whole[*-4]",
        "test_weight_formats_over_ranks_equal_the_whole[mixtral-*-dtype0]",
        "test_weight_formats_over_ranks_equal_the_whole[deepseek_v3-*-dtype0]",
        "test_weight_formats_over_ranks_equal_the_whole[qwen3_moe-*-dtype1]",
        "test_weight_formats_over_ranks_equal_the_whole[gpt_oss-*-dtype1]",
        "test_calibrated_engines_over_ranks_equal_the_whole[deepseek_v3-*",
        # an expert's place among the ranks is no family's own: one of each router and mixture stays
        *(
            f"test_families_over_ranks_equal_the_whole[{name}-*"
            for name in (
                "afmoe",
                "deepseek_v2",
                "dots1",
                "ernie4_5_moe",
                "exaone_moe",
                "glm4_moe",
                "granitemoe",
                "granitemoeshared",
                "hunyuan_v1_moe",
                "hy_v3",
                "kimi_k2",
                "mellum",
                "mistral4",
                "olmoe",
                "qwen2_moe",
                "sarvam_mla",
                "sarvam_moe",
                "solar_open",
            )
        ),
        "test_calibrated_engines_over_ranks_equal_the_whole[mixtral-smoothquant]",
        "test_weight_formats_over_ranks_equal_the_whole[qwen3_moe-*",
    ),
    "tests/serve/test_expert_parallel.py": ("test_whole_experts_of_each_rank_are_named",),
    "tests/ops/test_latent_rope_cache.py": (
        "test_8_bit_pages_are_rounded_as_in_the_reference[*-torch.float16]",
        "test_8_bit_pages_are_rounded_as_in_the_reference[*-interleaved-torch.float8*",
        "test_8_bit_pages_are_rounded_as_in_the_reference[*-neox-torch.int8*",
    ),
    "tests/ops/test_latent_attention.py": (
        "test_triton_follows_the_definition[*-torch.*]",
        "test_triton_follows_the_definition[torch.bfloat16-*",
        "test_triton_follows_the_definition[*-1-*",
        "test_triton_takes_any_number_of_heads*",
        "test_each_phase_leaves_the_rows_of_the_other_alone*",
    ),
    "tests/ops/test_score_mods.py": (
        "test_the_reference_follows_the_formulas[*-20]",
        "test_triton_decodes_the_same[1-*",
        "test_triton_decodes_the_same[3-one head-*",
    ),
    "tests/ops/test_elementwise_accesses.py": (
        "test_even_sizes_are_accessed_by_16_bytes[modelmill.ops.triton.attention.sigmoid_mul]",
    ),
    "tests/ops/test_gpu_generations.py": (
        "test_every_variant_compiles_and_fits_into_shared_memory*",
        "test_the_compiled_forms_cover_every_kernel_and_every_choice_of_a_launch_config",
        "test_the_launched_kernels_are_those_that_a_reader_finds",
    ),
    "tests/ops/test_norm_quant.py": ("test_every_form_agrees_with_the_reference*",),
    "tests/ops/test_rptq_linear.py": (
        "test_the_product_is_the_fake_quantized_one[*-2100-*",
        "test_the_product_is_the_fake_quantized_one[w8a8-*-triton]",
    ),
    "tests/ops/test_launch_configs.py": (
        "test_every_choice_computes_the_same[16-*",
        "test_every_choice_computes_the_same[1-*",
        "test_every_choice_computes_the_same_in_8_bits[1-*",
    ),
    "tests/ops/test_rope_cache_8bit.py": (
        "test_the_cache_write_rounds_as_the_reference[cpu-*-dtype[12]]",
    ),
    "tests/ops/test_integer_linear.py": (
        "test_the_kernel_is_the_fake_quantized_product[100-1-triton]",
        "test_the_kernel_is_the_fake_quantized_product[576-*-triton]",
    ),
    "tests/ops/test_wq_gemv_emulated.py": (
        "test_eight_bits_in_groups[32-2048-128-False]",
        "test_eight_bits_in_groups[48-672-32-True]",
        "test_four_bits[64-1056-32]",
        "test_four_bits[160-576-128]",
        "test_clustered_integers[4224-8]",
    ),
    "tests/ops/test_rptq_quant_emulated.py": (
        "test_clustered_integers[size0-dtype0]",
        "test_compiles_without_spills*",
    ),
    "tests/ops/test_wq_gemm_large_m_emulated.py": (
        "test_the_emulation_sees_mistakes*",
        "test_products[case1-*",
        "test_products[case4-*",
        "test_products[case0-*",
    ),
    "tests/ops/test_wq_gemm_pipelined_emulated.py": (
        "test_the_emulation_sees_mistakes*",
        "test_products[case0-*",
        "test_products[case1-*",
        "test_products[case8-*",
        "test_products[case9-*",
        "test_products[case2-*",
        "test_products[case4-*",
        "test_products[case6-*",
    ),
    "tests/ops/test_qkv_rope_cache_emulated.py": (
        "test_the_emulation_sees_mistakes*",
        "test_queries_keys_and_values[*size=(300*",
    ),
    "tests/ops/test_rmsnorm_quant_permute_small_m_emulated.py": (
        "test_the_emulation_sees_mistakes*",
        "test_values_and_scales[case[12]]",
    ),
    "tests/ops/test_paged_decode_emulated.py": (
        "test_the_emulation_sees_mistakes*",
        "test_16_bits[case[01]]",
        "test_8_bits[case[12]]",
    ),
    "tests/ops/test_cuda_wq_gemm_pipelined.py": ("test_compiles_without_spills*",),
    "tests/ops/test_cuda_wq_gemm_large_m.py": ("test_compiles_without_spills*",),
    "tests/ops/test_cuda_wq_gemm_small_m.py": ("test_compiles_without_spills*",),
    "tests/ops/test_cuda_build.py": (
        "test_int4_compiles_without_spills[*-8]",
        "test_int4_compiles_without_spills[*-16]",
        "test_int4_compiles_without_spills[*-32]",
        "test_int4_compiles_without_spills[*-False-*",
        "test_int4_compiles_without_spills[32-*",
        "test_products_of_one_row_compile_without_spills[spec[1-8]]",
        "test_int8_compiles_without_spills[*-8]",
        "test_int8_compiles_without_spills[*-16]",
        "test_int8_compiles_without_spills[*-32]",
        "test_int8_compiles_without_spills[*-True-*",
        "test_int8_compiles_without_spills[32-*",
        "test_clustered_compiles_without_spills*",
        "test_prefill_attention_compiles_without_spills[DIM=64*",
        "test_prefill_attention_compiles_without_spills[DIM=128 PAGE=128]",
        "test_prefill_attention_compiles_without_spills[DIM=128 PAGE=16 HALF]",
    ),
    "tests/ops/test_cuda_paged_decode16.py": ("test_compiles_without_spills*",),
    "tests/ops/test_cuda_paged_decode8.py": ("test_compiles_without_spills*",),
    "tests/ops/test_cuda_gemm_8bit.py": ("test_forms_compile_without_spills*",),
    "tests/ops/test_sample.py": (
        "test_ids_from_triton_are_the_references",
        "test_values_that_are_no_numbers[triton]",
        "test_draws_follow_the_distribution[triton]",
    ),
    "tests/ops/test_cpu_kernels.py": (
        # test_implementations runs the same cases on the instruction set of this machine
        "test_every_instruction_set_computes_the_reference[native-*",
        "test_two_processes_may_build_at_once_and_share_torchs_threads",
        "test_attention_of_few_rows[*-1]",
        "test_attention_of_few_rows[*-40]",
        "test_attention_of_few_rows[*-80]",
        "test_attention_of_few_rows[*-128]",
        "test_attention_of_few_rows[avx2-*-200]",
        "test_attention_of_few_rows[plain-*-200]",
        # sizes of groups whose code is that of others; native has all
        *(
            f"test_attention_of_few_rows[{isa}-{group}-*"
            for isa in ("avx2", "plain")
            for group in (2, 4, 5, 6, 7, 9)
        ),
        "test_attention_over_split_contexts[avx2-1]",
        "test_attention_over_split_contexts[avx2-300]",
        "test_attention_over_split_contexts[plain-1]",
        "test_attention_over_split_contexts[plain-300]",
    ),
    "tests/ops/test_registry.py": ("test_kernels_of_another_device_are_not_imported",),
    # faults and honest engines of further families and dtypes
    "tests/accept/test_segmentation.py": (
        "test_planted_faults_are_named[*float16*",
        "test_planted_faults_are_named[*float32-*",
        "test_the_report_tells_of_embedding_masks_and_scores[*float16]",
        "test_the_report_tells_of_embedding_masks_and_scores[float16-*",
        "test_the_report_tells_of_embedding_masks_and_scores[float32-*",
        "test_the_report_tells_of_embedding_masks_and_scores[bfloat16-fp8]",
        "test_rows_that_a_matrix_hides_are_named[*-bfloat16-fp8]",
        "test_what_connects_the_modules_is_judged[bfloat16]",
        "test_what_connects_the_modules_is_judged[float32-fp8]",
        "test_what_connects_the_modules_is_judged[float32]",
        "test_an_overflow_between_the_modules_is_called_one",
    ),
    "tests/accept/test_planted_faults.py": (
        "test_the_build_is_refused_in_every_dtype[gpt2-*",
        "test_the_build_is_refused_in_every_dtype[*-float16-*",
        "test_the_build_is_refused_in_every_dtype[*-float32-int8]",
        "test_the_build_is_refused_in_every_dtype[*-bfloat16-none]",
        "test_the_build_is_refused_in_every_dtype[llama-*-float32-none]",
        "test_the_build_is_refused_in_every_dtype[qwen-*-bfloat16-int8]",
        "test_a_faultless_engine_is_accepted_in_every_dtype[llama*",
        "test_a_faultless_engine_is_accepted_in_every_dtype[qwen*",
        "test_a_faultless_engine_is_accepted_in_every_dtype[gpt2-*-none]",
        "test_a_faultless_engine_is_accepted_in_every_dtype[mistral-*-int8]",
        "test_the_build_is_refused_in_every_dtype[*-eps / 10-*",
        "test_the_build_is_refused_in_every_dtype[*-RoPE base / 10-*",
    ),
    "tests/accept/test_act_quant.py": (
        "test_a_faultless_engine_is_accepted[llama-4]",
        "test_a_faultless_engine_is_accepted[qwen3-1]",
        "test_a_fault_is_refused_and_named[llama-eps x 10]",
        "test_a_faultless_engine_is_accepted[gpt2-*",
        "test_a_faultless_engine_is_accepted[llama-0]",
        "test_a_faultless_engine_is_accepted[llama-1]",
        "test_a_faultless_engine_is_accepted[llama-2]",
        "test_a_faultless_engine_is_accepted[llama-5]",
        "test_a_faultless_engine_is_accepted[llama-bias-*",
        "test_a_faultless_engine_is_accepted[llama-mqa-*",
        "test_a_faultless_engine_is_accepted[llama-tied-*",
        "test_a_faultless_engine_is_accepted[qwen-*",
        "test_a_faultless_engine_is_accepted[qwen2-*",
        "test_a_fault_is_refused_and_named[gpt2-*",
        "test_a_fault_is_refused_and_named[qwen-*",
        "test_a_fault_is_refused_and_named[llama-RoPE*",
        "test_a_fault_is_refused_and_named[llama-eps / 10]",
        "test_a_fault_is_refused_and_named[llama-o_proj*",
        "test_a_fault_is_refused_and_named[llama-the two norms renamed]",
        "test_a_kernel_that_errs_is_refused[a scale]",
    ),
    "tests/accept/test_low_bits.py": (
        "test_so_is_one_of_every_form[{'symmetric': True}]",
        "test_a_faultless_engine_is_accepted[gpt2-*",
        "test_a_faultless_engine_is_accepted[llama-float*",
        "test_a_faultless_engine_is_accepted[llama-bias-*",
        "test_a_faultless_engine_is_accepted[llama-mqa-*",
        "test_a_faultless_engine_is_accepted[llama-tied-*",
        "test_a_faultless_engine_is_accepted[qwen-*",
        "test_a_faultless_engine_is_accepted[qwen2-*",
        "test_a_faultless_engine_is_accepted[qwen3-bfloat16-*",
        "test_a_faultless_engine_is_accepted[qwen3-float32-*",
        "test_a_fault_is_refused_and_named[gpt2-*",
        "test_a_fault_is_refused_and_named[qwen-*",
        "test_a_fault_is_refused_and_named[llama-RoPE*",
        "test_a_fault_is_refused_and_named[llama-o_proj x 1.05]",
        "test_so_is_one_of_every_form[{'group_size': -1}]",
    ),
    "tests/accept/test_output_gain.py": (
        "test_a_factor_on_shrunk_weights_is_refused_and_named[0.95]",
        "test_a_factor_is_refused_and_named_in_every_recipe[*-1.05]",
        "test_a_factor_is_refused_and_named_in_every_recipe[rptq w8a8-*",
        "test_a_factor_is_refused_and_named_in_every_recipe[rptq w4a4-*",
        "test_a_factor_is_refused_and_named_in_every_recipe[int4 gptq*",
        "test_a_factor_is_refused_and_named_in_every_recipe[int4 awq*",
        "test_a_factor_is_refused_and_named_in_every_recipe[int4 nearest True-*",
        "test_a_factor_is_refused_and_named_in_every_recipe[smoothquant*",
        "test_a_factor_is_refused_and_named_in_every_recipe[fp8*",
        "test_a_factor_is_refused_and_named_in_every_recipe[int8*",
    ),
    "tests/accept/test_vision_encoder.py": (
        "test_a_refused_engine_is_not_written",
        "test_planted_faults_are_named[float16-*",
        "test_planted_faults_are_named[bfloat16-*",
        "test_faults_of_a_tower_in_8_bits_are_named[('bfloat16'*",
        "test_what_no_module_shows[*float16]",
    ),
    "tests/accept/test_rounding_amplification.py": (
        "test_a_right_engine_beyond_the_published_bound_is_accepted[float32-int8]",
        "test_a_right_engine_beyond_the_published_bound_is_accepted[bfloat16-none]",
        "test_a_page_lost_before_decoding_is_refused_where_rounding_is_amplified[*-int8]",
        "test_a_state_lost_between_steps_is_refused_there_too[bfloat16-*",
    ),
    "tests/accept/test_biases.py": (
        "test_a_wrong_bias_is_refused[*-rptq]",
        "test_a_wrong_bias_is_refused[*-int4]",
        "test_a_wrong_bias_is_refused[qkv-fp8]",
        "test_a_wrong_bias_is_refused[qkv-smoothquant]",
        "test_a_wrong_bias_is_refused[o-int8]",
        "test_a_wrong_bias_is_refused[o-smoothquant]",
        "test_a_wrong_bias_is_refused[gate and up-fp8]",
        "test_a_wrong_bias_is_refused[gate and up-smoothquant]",
        "test_a_wrong_bias_is_refused[fc-int8]",
        "test_a_wrong_bias_is_refused[fc-fp8]",
        "test_a_wrong_bias_is_refused[norm-fp8]",
        "test_a_wrong_bias_is_refused[norm-smoothquant]",
        "test_a_wrong_bias_is_refused[made up-int8]",
        "test_a_wrong_bias_is_refused[made up-smoothquant]",
        "test_faultless_ones_are_accepted[int*",
        "test_faultless_ones_are_accepted[smoothquant]",
        "test_faultless_ones_are_accepted[rptq]",
    ),
    "tests/accept/test_row_and_tile_errors.py": (
        "test_an_engine_with_such_a_fault_is_refused[*-fp8]",
        "test_an_engine_with_such_a_fault_is_refused[*-smoothquant]",
        "test_an_engine_with_such_a_fault_is_refused[None-int8]",
        "test_an_engine_with_such_a_fault_is_refused[rows_swapped-int4]",
    ),
    # whole builds
    "tests/builder/test_memory_plan.py": (
        "test_six_plans_are_within_15_percent_of_the_peak",
        "test_of_many_batches_only_one_is_inside_a_layer",
        # it sees seconds of imports, no wrong plan
        "test_planning_loads_no_compiler_of_torch",
    ),
    "tests/builder/test_multimodal_calibration.py": (
        "test_lines_that_are_no_good_are_named[1*",
        "test_no_sequence_ends_inside_a_picture",
        "test_auto_looks_at_pictures_too",
        "test_a_build_with_pictures_is_the_same_twice_and_reported[{}]",
    ),
    "tests/builder/test_act_quant_builds.py": (
        "test_a_head_in_integers_scales_its_inputs_as_they_come[gpt2-*",
        "test_a_head_in_integers_scales_its_inputs_as_they_come[llama-w4a8*",
        "test_clusters_are_as_large_as_planned_and_heavy_inputs_alone_have_copies[{'*",
        "test_two_builds_are_bit_identical",
        "test_an_interrupted_smoothing_goes_on_where_it_was*",
        "test_a_head_in_integers_scales_its_inputs_as_they_come[llama-w8a8-dynamic]",
    ),
    "tests/builder/test_auto_precision.py": (
        "test_what_the_choice_was_made_on_is_no_text_to_be_judged_by",
        "test_a_wider_limit_is_never_larger_and_what_is_reported_is_kept",
        "test_a_rounded_head_is_within_the_limit",
        "test_the_search_is_the_same_every_time",
        "test_a_mixed_engine_is_built_and_accepted[float32]",
    ),
    "tests/test_segmenter.py": ("test_mobilesam_engines_keep_the_facts",),
    # servers that are loaded, killed or kept waiting
    "tests/serve/test_server.py": (
        "test_a_log_that_is_not_read",
        "test_loading_is_reported_and_requests_are_refused_meanwhile",
        "test_a_worker_that_is_killed",
        "test_a_system_without_descriptors_for_a_while",
        "test_a_shutdown_that_does_not_wait*",
        "test_two_engines_from_a_file",
    ),
    "tests/serve/catalogue/test_catalogue_server.py": (
        # test_sleeping_models asks a server for the same
        "test_every_dialect_takes_keep_alive_and_loads_the_model",
        "test_ollama_lists_shows_and_unloads_without_loading",
        "test_a_killed_worker_is_replaced_for_the_next_request",
        "test_the_context_is_known_before_a_model_is_loaded",
        "test_the_server_reads_special_tokens_by_default",
    ),
    "tests/serve/test_examples.py": (
        "test_sync",
        "test_async",
        "test_stream",
        "test_functions",
    ),
    "tests/serve/test_watchdog.py": (
        "test_a_server_with_a_worker_that_is_stopped",
        "test_a_rank_that_is_stopped_*",
        "test_a_worker_for_pictures_that_is_stopped",
        "test_a_real_worker_that_hangs",
    ),
    "tests/serve/test_worker.py": (
        "test_a_worker_ends_with_its_server*",
        "test_what_cannot_be_opened_is_reported_in_one_line",
    ),
    "tests/serve/test_sessions.py": ("test_two_ranks_save_and_restore",),
    "tests/serve/test_tools.py": ("test_several_calls_at_once",),
    "tests/serve/test_structured.py": (
        "test_an_answer_whose_grammar_takes_too_much_work_is_an_error_and_not_whole",
    ),
    "tests/trust/test_soak.py": ("*",),
    "tests/trust/test_builds.py": (
        "test_a_checkpoint_that_changes_while_it_is_built",
        "test_killed_at_any_moment*",
        "test_a_stranger_in_the_staging_folder_does_not_reach_the_engine",
    ),
    "tests/trust/test_replies.py": (
        "test_a_large_reply_is_whole",
        "test_a_large_reply_delays_no_other_request[*-1048576*",
        "test_a_large_reply_delays_no_other_request[*-4194304]",
    ),
    "tests/trust/test_request_bodies.py": (
        "test_a_large_body_delays_no_other_request[/detokenize-tokens-texts-4]",
        "test_an_answer_with_its_log_probabilities_comes_back*",
    ),
    "tests/trust/test_grammars.py": (
        "test_ten_thousand_schemas_leave_nothing_behind",
        "test_hundreds_of_schemas_through_the_api_leave_nothing_behind",
    ),
    "tests/trust/test_fuzz.py": ("test_hostile_requests_at_random",),
    "tests/test_architecture.py": ("test_skipped_modules_lend_nothing",),
    "tests/accept/test_static_range_check.py": (
        "test_a_planted_mismatch_is_named[fallback]",
        "test_text_of_one_kind_is_not_warned_about[fallback]",
    ),
    "tests/ops/test_gemm_swiglu_large_m_emulated.py": ("test_products[*size=(300*",),
    # numbers and texts of many kinds
    "tests/weights/test_row_independence.py": (
        "test_what_is_no_number_in_one_row_stays_there[*float16]",
        "test_what_is_no_number_in_one_row_stays_there[*-80-*",
    ),
    "tests/models/test_sam_sizes.py": (
        "test_a_small_model_answers_every_prompt_as_transformers_does[208]",
    ),
    "tests/models/test_toy_family.py": (
        "test_a_fault_in_its_odd_modules_is_named[swapped_names-int8-*",
        "test_a_fault_in_its_odd_modules_is_named[another_gate-none-*",
    ),
    "tests/trust/test_config_json.py": (
        "test_any_value_of_any_key[*-mistral]",
        "test_any_value_of_any_key[*-qwen2]",
        # keys that every family reads by the same code
        "test_any_value_of_any_key[torch_dtype-qwen3]",
        "test_any_value_of_any_key[architectures*-qwen3]",
        "test_any_value_of_any_key[mlp_bias-qwen3]",
    ),
    # further families: each keeps its logits, its split over ranks and its refused values
    "tests/models/test_dense_families.py": (
        "test_every_recipe_is_built_and_accepted[phi-*-int8]",
        "test_every_recipe_is_built_and_accepted[phi-*-fp8]",
        "test_every_recipe_is_built_and_accepted[olmo2-*-int8]",
        "test_every_recipe_is_built_and_accepted[olmo2-*-fp8]",
        "test_every_recipe_is_built_and_accepted[glm4-*-int8]",
        "test_every_recipe_is_built_and_accepted[glm4-*-fp8]",
        "test_logits_of_every_switch[further-*",
        "test_logits_of_every_switch[glm4-*",
        "test_logits_of_every_switch[olmo2-*",
        *(f"test_split_over_ranks_equals_whole[further-{name}-*" for name in ALIKE),
        "test_logits[further-bitnet]",
        "test_logits[further-diffllama]",
        "test_logits[further-exaone]",
        "test_logits[further-hunyuan_v1_dense]",
        "test_logits[further-hunyuan_v1_moe]",
        "test_logits[further-hy_v3]",
        "test_logits[further-iquestcoder]",
        "test_logits[further-jais2]",
        "test_logits[further-kimi_k2]",
        "test_logits[further-lfm2_moe]",
        "test_logits[further-mellum]",
        "test_logits[further-mistral4]",
        "test_logits[further-persimmon]",
        "test_logits[further-phimoe]",
        "test_logits[further-sarvam_mla]",
        "test_logits[further-youtu]",
        "test_split_over_ranks_equals_whole[*-2]",
        "test_split_over_ranks_equals_whole[*-4]",
        "test_a_warm_prefix_and_preempted_answers[further-*",
        "test_pages_of_8_bits[further-*",
        "test_every_recipe_is_built_and_accepted[further-*",
        "test_every_recipe_is_built_and_accepted[*-bfloat16-*",
        "test_a_planted_fault_is_refused_by_name[further-*",
        "test_a_planted_fault_is_refused_by_name[*-float32-*",
        # of each recipe, two families stay
        *(
            f"test_every_recipe_is_built_and_accepted[{name}-float32-{recipe}]"
            for name, recipe in (
                ("olmo2", "int4"),
                ("phi", "int4"),
                ("glm4", "smoothquant"),
                ("phi", "smoothquant"),
                ("glm4", "rptq"),
                ("granite", "rptq"),
            )
        ),
        # test_family_gguf.py compares the logits of these, too, in an accepted engine
        *(
            f"test_logits[further-{name}]"
            for name in (
                "afmoe",
                "apertus",
                "baichuan",
                "bloom",
                "chatglm",
                "cohere2",
                "deepseek_v2",
                "dots1",
                "ernie4_5",
                "ernie4_5_moe",
                "exaone_moe",
                "falcon",
                "gemma",
                "gemma2",
                "gemma3_text",
                "gemma4_text",
                "glm4_moe",
                "glm4_moe_lite",
                "gpt_bigcode",
                "gpt_neox",
                "granitemoe",
                "internlm",
                "internlm2",
                "minicpm",
                "ministral3",
                "mpt",
                "nemotron",
                "nemotron_h",
                "phi3",
                "qwen3_5_moe_text",
                "qwen3_5_text",
                "sarvam_moe",
                "stablelm",
                "starcoder2",
            )
        ),
    ),
    "tests/models/test_gpt_oss.py": (
        "test_mxfp4_is_expanded_for_another_recipe*",
        "test_wrongly_read_mxfp4_is_refused_by_name[*-bfloat16]",
        "test_wrongly_read_mxfp4_is_refused_by_name[exchanged_halves-*",
        "test_wrongly_read_mxfp4_is_refused_by_name[lost_sign-*",
        "test_wrongly_read_mxfp4_is_refused_by_name[scales_of_the_next_block-*",
        "test_wrong_sinks_are_refused_by_name[*-bfloat16]",
        "test_wrong_sinks_are_refused_by_name[sinks_of_other_heads-*",
        "test_wrong_sinks_are_refused_by_name[a_larger_sink-*",
    ),
    "tests/models/test_moe_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in ("experts swapped", "one expert's scale", "shared gate x", "weights f")
        ),
    ),
    "tests/models/test_extreme_inputs.py": (
        *(f"*-{recipe}]" for recipe in ("int8", "fp8", "int4", "smoothquant", "rptq")),
        # bounds are values of any dtype; a clamp in bfloat16 stays
        "test_a_fault_of_a_bound_that_no_text_reaches[w*-bfloat16-none]",
        "test_a_fault_of_a_bound_that_no_text_reaches[a *-bfloat16-none]",
        "test_a_fault_of_a_bound_that_no_text_reaches[cap *-bfloat16-none]",
        "test_a_fault_of_a_bound_that_no_text_reaches[l*-bfloat16-none]",
        "test_a_fault_of_a_bound_that_no_text_reaches[s*-bfloat16-none]",
        "test_a_fault_of_a_bound_that_no_text_reaches[q*-bfloat16-none]",
        "test_a_fault_of_a_bound_that_no_text_reaches[up*-bfloat16-none]",
        *(
            f"test_a_fault_of_a_bound_that_no_text_reaches[no {bound}-bfloat16-none]"
            for bound in ("window", "cap of scores", "cap of logits", "largest step", "least step")
        ),
        *(
            f"test_a_right_engine_with_such_a_bound_is_accepted[{bound}-bfloat16-none]"
            for bound in ("window", "largest step", "least step", "factors")
        ),
    ),
    "tests/models/test_gemma4_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        # one fault of each mechanism stays
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "a router",
                "another weight",
                "eps of values",
                "experts forgotten",
                "layer inputs",
                "no activation",
                "no number",
                "one row",
                "projection",
                "queries for",
                "rows",
                "the number of one",
                "the number times",
                "the other rotation",
                "the router's",
                "their projection",
                "values no",
            )
        ),
    ),
    "tests/models/test_delta_net_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "SiLU",
                "beta",
                "convolution r",
                "decay",
                "dt_bias",
                "gate",
                "inputs",
                "keys",
                "norms",
                "one head",
                "output gate w",
                "output gate's",
                "queries",
                "rates",
                "v and z",
            )
        ),
    ),
    "tests/models/test_mamba2_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "A for",
                "B ",
                "D f",
                "SiLU",
                "convolution'",
                "decay",
                "dt_bias",
                "heads",
                "inputs",
                "norm",
                "steps",
                "x and",
            )
        ),
    ),
    "tests/models/test_gpt_oss_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "YaRN",
                "a window",
                "alpha",
                "an expert",
                "experts",
                "gate and up e",
                "router",
                "sinks o",
                "sinks'",
                "up ",
                "window + 1",
                "window - 1",
            )
        ),
    ),
    "tests/models/test_soft_cap_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "a cap",
                "a norm",
                "another",
                "bounded",
                "caps",
                "embeddings s",
                "last",
                "no cap of scores-",
                "no cap of scores in",
                "norms b",
                "norms in",
                "scores",
                "window",
            )
        ),
    ),
    "tests/models/test_alibi_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "a bias",
                "another",
                "exponents",
                "finer",
                "heads",
                "no ALiBi-",
                "norm",
                "one",
                "slopes of",
                "slopes s",
                "slopes x",
                "slopes'",
            )
        ),
    ),
    "tests/models/test_adapter_names.py": ("*[further-*",),
    "tests/builder/test_expert_loop.py": (
        "test_nothing_is_said_of_experts_that_are_grouped[mixtral-options[1-4]]",
        "test_the_loader_and_doctor_agree[mixtral-options[1-2]]",
        "test_the_loader_and_doctor_agree[mixtral-options[4-7]]",
        "test_both_loops_compute_the_mixture[*static scales]",
    ),
    "tests/models/test_qkv_clip_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        "test_a_bound_that_no_text_reaches[*-bfloat16-*",
        *(
            f"test_a_bound_that_no_text_reaches[*-float32-{recipe}]"
            for recipe in ("int8", "fp8", "int4", "smoothquant", "rptq")
        ),
        "test_a_right_engine_with_such_a_bound_is_accepted[*-olmoe]",
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "0",
                "a ",
                "behind",
                "bound",
                "heads",
                "in front of the p",
                "keys",
                "no ",
                "queries",
                "rows",
                "the",
                "values l",
            )
        ),
    ),
    "tests/models/test_normed_head_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "all",
                "an",
                "as",
                "cosines",
                "embeddings",
                "halves",
                "largest",
                "logits",
                "multiplied",
                "norm",
                "ro",
                "s",
                "the",
            )
        ),
    ),
    "tests/models/test_learned_position_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        "test_a_fault_of_some_steps_is_refused_by_name[positions*",
        "test_a_fault_of_some_steps_is_refused_by_name[counted from*",
        "test_a_fault_of_some_steps_is_refused_by_name[decoded at*",
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "counted",
                "every",
                "from row 0",
                "from row 3",
                "half",
                "multiplied",
                "no",
                "positions",
                "rotated",
                "rows",
                "sines",
                "the",
                "tokens",
            )
        ),
    ),
    "tests/models/test_partial_rotary_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "a ",
                "all",
                "angles",
                "b",
                "c",
                "exponents from",
                "exponents of pairs",
                "half",
                "keys",
                "n",
                "queries",
                "slowest",
                "the",
                "values",
            )
        ),
    ),
    "tests/models/test_differential_attention_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "values",
                "eps",
                "first",
                "heads",
                "k2",
                "keys",
                "lambda",
                "maps",
                "no norm",
                "norm",
                "q1",
                "scores",
                "start",
            )
        ),
    ),
    "tests/models/test_rope_before_qk_norm_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "values",
                "backwards",
                "base",
                "eps",
                "keys",
                "neighbouring",
                "no weight",
                "norms",
                "not",
                "one",
                "pairs",
                "queries",
                "rotated",
                "weight",
            )
        ),
    ),
    "tests/models/test_sparse_mixer_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "distance",
                "first",
                "next",
                "no noise",
                "router",
                "second",
                "sigmoid",
                "softmax",
                "twice",
                "weights",
            )
        ),
    ),
    "tests/models/test_head_gate_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in ("tanh", "twice", "SiLU", "one", "the next")
        ),
    ),
    "tests/models/test_sub_norm_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "attention",
                "eps",
                "half",
                "heads",
                "less",
                "no eps",
                "no weight",
                "one half",
                "sum",
                "the",
                "weight",
            )
        ),
    ),
    "tests/models/test_short_conv_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "B",
                "C",
                "SiLU",
                "convolution of",
                "convolution reversed",
                "convolution's",
                "input",
                "output",
                "reads",
                "state",
                "the",
                "x",
            )
        ),
    ),
    "tests/models/test_group_limited_router_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "bias",
                "experts",
                "groups ranked by their best",
                "groups ranked by their last",
                "groups ranked without",
                "no",
                "one",
                "router's",
                "scale",
                "softmax",
                "weights",
            )
        ),
    ),
    "tests/models/test_parallel_hybrid_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "D",
                "attention",
                "convolution",
                "input",
                "key",
                "mean",
                "multiplier",
                "norm",
                "output",
                "recurrence behind",
            )
        ),
    ),
    "tests/models/test_one_branch_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "KV",
                "ReLU",
                "an",
                "attention",
                "bias",
                "eps",
                "inputs",
                "no",
                "scale",
                "scores",
                "shared",
                "steps",
                "z",
            )
        ),
    ),
    "tests/models/test_long_rope_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        "test_lists_that_no_sequence_reads[short*",
        "test_lists_that_no_sequence_reads[lists*",
        "test_a_rotation_that_grows*",
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "always",
                "base",
                "bound",
                "frequencies",
                "lists",
                "long factors",
                "long one",
                "no",
                "one",
                "short",
                "temperature",
            )
        ),
    ),
    "tests/checkpoint/test_bitnet_format.py": (
        "test_logits_are_those_of_transformers_with_these_values[divided]",
        "test_logits_are_those_of_transformers_with_these_values[online]",
        "test_logits_are_those_of_transformers_with_these_values[multiplied]",
    ),
    "tests/models/test_xielu_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "a cube",
                "a linear",
                "alpha_n",
                "alpha_p x",
                "alpha_p'",
                "beta",
                "bound",
                "eps",
                "no -x",
                "no linear",
                "no square",
                "ReLU",
            )
        ),
    ),
    "tests/models/test_latent_attention_steps.py": ("*",),
    "tests/models/test_latent_attention_faults.py": (
        *FURTHER_ENGINES_OF_FAULTS,
        *(
            f"test_a_planted_fault_is_refused_by_name[{fault}*"
            for fault in (
                "YaRN",
                "an up",
                "eps",
                "key",
                "latent split off",
                "norm of k",
                "norm of q",
                "norm over",
                "pairs",
                "queries",
                "rotat",
                "scores s",
                "values o",
            )
        ),
    ),
    "tests/builder/test_rank_memory.py": (
        "test_the_plan_of_a_rank_is_what_it_loads[dense]",
        "test_the_plan_of_a_rank_is_what_it_loads[more ranks than KV heads]",
        "test_the_plan_of_a_rank_is_what_it_loads[channel scales]",
        "test_the_plan_of_a_rank_is_what_it_loads[groups]",
        "test_the_plan_of_a_rank_is_what_it_loads[latent attention]",
        "test_the_plan_of_a_rank_is_what_it_loads[a tied head, biases]",
    ),
    "tests/builder/test_config_only.py": (
        *(f"test_the_plan_is_that_of_the_weights[{name}]" for name in ALIKE),
        "test_parameters_are_those_that_the_authors_count[gemma-4-26B-A4B]",
        "test_parameters_are_those_that_the_authors_count[Qwen3-30B-A3B]",
        "test_parameters_are_those_that_the_authors_count[Qwen3-Next-80B-A3B]",
        "test_parameters_are_those_that_the_authors_count[DeepSeek-V2-Lite]",
        "test_parameters_are_those_that_the_authors_count[gpt-oss-20b]",
    ),
    "tests/models/test_families.py": ("test_qwen_v1_at_every_length[{'*",),
    "tests/models/test_config_combinations.py": ("test_switches_together[further-*",),
    "tests/models/test_config_sweep.py": (
        "test_other_values_are_computed_or_refused_by_name[mistral]",
        "test_other_values_are_computed_or_refused_by_name[qwen2]",
        "test_other_values_are_computed_or_refused_by_name[qwen3]",
    ),
    # formats that differ from others in their marks alone
    # marks that are text stay; as control tokens they are single ids of the same grammar
    "tests/text/test_calls_or_schema.py": (
        "test_a_call_and_content_are_allowed_and_nothing_else[*-True]",
    ),
    "tests/text/test_answer_grammar.py": (
        "*_in_every_syntax[qwen_react]",
        "*_as_declared_or_not_at_all[qwen_react]",
        "*_in_every_syntax[deepseek_v32]",
        "*_as_declared_or_not_at_all[deepseek_v32]",
        "*_in_every_syntax[deepseek_v4]",
        "*_as_declared_or_not_at_all[deepseek_v4]",
        "*_in_every_syntax[glm47]",
        "*_as_declared_or_not_at_all[glm47]",
        "*_in_every_syntax[granite_20b]",
        "*_as_declared_or_not_at_all[granite_20b]",
        "*_in_every_syntax[hunyuan]",
        "*_as_declared_or_not_at_all[hunyuan]",
        "*_in_every_syntax[nemotron_nano]",
        "*_as_declared_or_not_at_all[nemotron_nano]",
        "*_in_every_syntax[seed_oss]",
        "*_as_declared_or_not_at_all[seed_oss]",
        "*_in_every_syntax[mistral_v13]",
        "*_as_declared_or_not_at_all[mistral_v13]",
        "*_in_every_syntax[gemma3]",
        "*_as_declared_or_not_at_all[gemma3]",
        "*_in_every_syntax[described]",
        "*_as_declared_or_not_at_all[described]",
        "*_in_every_syntax[function_gemma]",
        "*_as_declared_or_not_at_all[function_gemma]",
        "*_in_every_syntax[minimax_m1]",
        "*_as_declared_or_not_at_all[minimax_m1]",
        "*_in_every_syntax[internlm2]",
        "*_as_declared_or_not_at_all[internlm2]",
    ),
    "tests/text/test_tokenizer_loader.py": ("test_bombs_take_seconds_at_most*",),
    "tests/models/test_blip2.py": (
        "*[mistral*",
        "*[qwen*",
    ),
    "tests/text/test_tool_grammar.py": (
        "test_what_a_forced_call_writes_is_a_call_that_the_function_takes[*-True]",
    ),
    "tests/vision/test_sam_model.py": ("test_the_truck_window",),
    "tests/vision/test_automatic_mask_generator.py": (
        "test_blots_are_kept_as_plain_loops_keep_them[options3-4]",
    ),
    "tests/ops/test_cuda_gemm.py": (
        "test_few_rows_compile_without_spills[False-*",
        "test_few_rows_compile_without_spills[True-8]",
        "test_many_rows_compile_without_spills*",
        "test_rope_rows_compile_without_spills*",
        "test_norms_in_another_order_compile_without_spills[PER_TOKEN=0*",
        "test_norms_of_a_row_in_another_order_compile_without_spills[PER_TOKEN=0*",
    ),
    "tests/accept/test_embedding_and_head.py": (
        "test_a_wrong_head_is_refused[None-int4]",
        "test_a_wrong_head_is_refused[None-fp8]",
        "test_a_wrong_head_is_refused[None-rptq]",
        "test_a_wrong_head_is_refused[rows_swapped-int8]",
        "test_a_wrong_head_is_refused[rows_swapped-smoothquant]",
        "test_a_wrong_head_is_refused[rows_swapped-rptq]",
    ),
    "tests/accept/test_unused_tensors.py": (
        "test_masks_are_the_causal_one[attn.bias of booleans]",
        "test_masks_are_the_causal_one[attn.bias of bytes]",
        "test_masks_are_the_causal_one[attn.bias of a row]",
        "test_masks_are_the_causal_one[attn.masked_bias of zero]",
        "test_what_a_sam_saves_beside_its_weights[pixel_*",
    ),
    "tests/accept/test_rptq.py": (
        "test_so_is_one_of_four_bits*",
        "test_a_faultless_engine_is_accepted[gpt2-*",
        "test_so_is_one_whose_heavy_inputs_have_several_columns[gpt2-*",
        "test_wrong_clusters_are_refused[_step]",
    ),
    "tests/accept/test_accept_run.py": ("test_the_eps_of_a_head_norm_is_judged[float32-*",),
    "tests/accept/test_quantization_error.py": (
        "test_every_quantized_matrix_has_its_errors_bits_and_outliers[int*",
    ),
    "tests/builder/test_quantized_builds.py": (
        "test_an_interrupted_calibration_goes_on_where_it_was[gpt2]",
    ),
    "tests/builder/test_tied_head.py": (
        "test_a_head_of_its_own_is_used_and_said[llama-tied]",
        "test_the_embedding_once_more_is_dropped_without_a_word[half]",
    ),
    "tests/quant/test_toy_recipe.py": (
        "test_acceptance_finds_a_fault_in_its_format[a product without the offset]",
        "test_its_option_is_refused_by_other_recipes_and_checked",
    ),
    "tests/benchmarks/test_sam.py": (
        "test_a_click_and_an_embedding_become_rows",
        "test_a_compiled_side_has_a_process_for_each_batch",
        "test_without_a_peer_that_fails_the_others_are_measured",
    ),
    "tests/benchmarks/test_minigpt4.py": (
        "test_transformers_runs_the_same_sizes",
        "test_without_vllm_the_other_sides_are_measured",
    ),
    "tests/benchmarks/test_engine_cache.py": (
        "test_the_calibration_of_a_refused_build_*[rptq-False]",
        "test_the_calibration_of_a_refused_build_*[int8-*",
    ),
    "tests/cli/test_server_commands.py": (
        "test_a_shell_completes_running_servers[words0]",
        "test_a_client_gets_an_address_that_it_can_reach[http://10*",
    ),
    "tests/cli/test_output.py": (
        "test_tables_without_sequences",
        "test_intermediate_output_without_a_reader",
        # each starts a process that imports torch: make test has --version, which does not
        "test_a_full_disk_is_one_line[words[0-2]]",
        "test_a_stream_that_was_closed_before*",
        "test_an_answer_ends_where_no_client_reads_it[JSON]",
    ),
    "tests/cli/test_build_quantized.py": ("test_dry_run_tells_the_size_that_is_written",),
    "tests/cli/test_verbs.py": ("test_bench_startup",),
    # a mechanism's own tests see its faults; one of each recipe is used through the command line
    "tests/cli/test_mechanisms.py": (
        "test_one_server_has_them_all",
        "test_build_run_chat_and_compare[none-experts]",
        "test_build_run_chat_and_compare[none-experts with sinks]",
        "test_build_run_chat_and_compare[none-gated delta rule]",
        "test_build_run_chat_and_compare[none-ALiBi]",
        "test_build_run_chat_and_compare[none-windows]",
        "test_build_run_chat_and_compare[none-state space]",
        "test_build_run_chat_and_compare[int8-*",
    ),
    # tests/serve/test_answer_history.py and the dialects' tests count cached tokens
    "tests/tools/test_agent_replay.py": ("test_a_short_session_comes_from_the_cache",),
    # starts servers; a fault in a route is one of tests/serve, the tool's parts have tests here
    "tests/tools/test_peer_server_tests.py": ("test_a_run",),
    "tests/core/test_env.py": (
        "test_threads_sleep_at_once[library]",
        "test_a_users_own_word_stands",
        "test_a_users_own_word_stands_for_the_library",
        "test_where_torch_was_first_its_threads_spin_no_longer",
    ),
    "tests/runtime/test_state_snapshots.py": (
        "test_a_conversation_in_whole_steps_gives_the_same_tokens",
        "test_batches_and_mixed_steps_compute_what_single_ones_do",
        "test_preempted_sequences_go_on_as_before[False]",
        "test_fewer_sequences_run_where_states_do_not_fit",
    ),
    "tests/runtime/test_page_groups.py": (
        # a family of alternating windows and one of experts stay
        "test_preempted_sequences_answer_the_same[True-gemma3_text]",
        "test_decode_graphs_read_every_groups_table_at_its_address[gpt_oss]",
        "test_logits_are_the_same_bit_for_bit[*-olmo3]",
        "test_logits_are_the_same_bit_for_bit[*-cohere2]",
        "test_logits_are_the_same_bit_for_bit[*-exaone4]",
        # of three sizes of a page, the two that differ by layer stay
        "test_every_family_answers_the_same_with_fewer_pages[gemma4_text]",
        "test_logits_are_the_same_bit_for_bit[*-gemma4_text]",
        "test_8_bit_pages_of_layers_that_differ[*-gemma4_text]",
        "test_forks_and_beams[*-gemma4_text]",
        "test_forks_and_beams[options0-gemma4_text:wide]",
        "test_forks_and_beams[options1-gemma4_text:narrow]",
        "test_preempted_sequences_answer_the_same[*-gemma4_text]",
        "test_preempted_sequences_answer_the_same[False-gemma4_text:narrow]",
        "test_decode_graphs_read_every_groups_table_at_its_address[gemma4_text]",
        # of two ways to run and two families, each stays once
        "test_preempted_sequences_answer_the_same[*-gpt_oss]",
        "test_preempted_sequences_answer_the_same[*-gemma4_text:wide]",
        "test_8_bit_pages_of_layers_that_differ[*-gemma4_text:narrow]",
        "test_8_bit_pages_of_layers_that_differ[fp8-*",
        "test_logits_are_the_same_bit_for_bit[None-gpt_oss]",
        "test_logits_are_the_same_bit_for_bit[None-gemma3_text]",
        "test_logits_are_the_same_bit_for_bit[None-gemma4_text:narrow]",
        "test_logits_are_the_same_bit_for_bit[40-gemma4_text:wide]",
        "test_logits_are_the_same_bit_for_bit[40-gemma2]",
        "test_the_longest_sequence_runs_in_the_pages_that_capacity_asks_for[True-False]",
        "test_the_longest_sequence_runs_in_the_pages_that_capacity_asks_for[False-True]",
        "test_decode_graphs_read_every_groups_table_at_its_address[gemma4_text:narrow]",
        # of families with one size of a page, gemma2 and gpt_oss stay
        *(
            f"test_every_family_answers_the_same_with_fewer_pages[{name}]"
            for name in ("gemma3_text", "cohere2", "olmo3", "exaone4", "gemma4_text:wide")
        ),
        "test_preempted_sequences_answer_the_same[False-gemma3_text]",
        "test_logits_are_the_same_bit_for_bit[40-gemma3_text]",
        "test_logits_are_the_same_bit_for_bit[40-gpt_oss]",
        "test_forks_and_beams[*-gemma3_text]",
        "test_decode_graphs_read_every_groups_table_at_its_address[gemma3_text]",
    ),
    "tests/runtime/test_session_rank_transfer.py": (
        "test_as_many_ranks_go_on_bit_for_bit[gemma2-*",
        "test_as_many_ranks_go_on_bit_for_bit[llama-*",
        "test_as_many_ranks_go_on_bit_for_bit[gpt2-*",
        "test_another_number_of_ranks_is_one_line[gpt2-1-2]",
        "test_another_number_of_ranks_is_one_line[gpt2-2-3]",
        # test_tp_worker_pool.py kills a rank, too
        "test_a_killed_rank_is_one_line",
    ),
    "tests/runtime/test_tp_worker_pool.py": (
        "test_the_same_answers_as_one[gemma4_text-2]",
        "test_the_same_answers_as_one[gemma2-2]",
        "test_the_same_answers_as_one[gpt2-3]",
        "test_the_same_answers_as_one[qwen2-*",
        "test_the_same_answers_as_one[qwen3_5_text-2]",
        "test_embeddings_beside_answers*",
        "test_the_same_answers_with_whole_experts_on_each_rank[gpt_oss-2]",
        "test_the_same_answers_with_whole_experts_on_each_rank[mixtral-int8-3]",
        "test_a_killed_rank_is_one_clear_error[3]",
        "test_rank_0_may_be_killed",
        "test_forgotten_loops_leave_no_processes",
    ),
    "tests/runtime/test_logits_processors.py": (
        "test_greedy_answers_are_those_of_transformers[{'min_length*",
        "test_beams_are_those_of_transformers[{'forced_eos_token_id': 7}]",
        "test_beams_are_those_of_transformers[{'no_repeat_ngram_size': 2}]",
        "test_beams_are_those_of_transformers[{'forced_bos_token_id': 5}]",
        "test_greedy_answers_are_those_of_transformers[{'encoder_*",
        "test_greedy_answers_are_those_of_transformers[{'bad_words_ids': [[0]*",
        "test_greedy_answers_are_those_of_transformers[{'forced_eos_token_id': 5}]",
        "test_greedy_answers_are_those_of_transformers[{'no_repeat_ngram_size': 1}]",
        "test_greedy_answers_are_those_of_transformers[{'no_repeat_ngram_size': 3}]",
        "test_greedy_answers_are_those_of_transformers[{'repetition_penalty': 0.7}]",
        "test_greedy_answers_are_those_of_transformers[{'suppress_tokens': [40]}]",
        "test_beams_are_those_of_transformers[{'encoder_*",
        "test_beams_are_those_of_transformers[{'sequence_bias*",
        "test_beams_are_those_of_transformers[{'suppress_*",
        "test_beams_are_those_of_transformers[{'begin_*",
        "test_beams_are_those_of_transformers[{'min_*",
        "test_beams_are_those_of_transformers[{'exponential*",
        "test_beams_are_those_of_transformers[{'no_repeat_ngram_size': 1}]",
        "test_beams_are_those_of_transformers[{'no_repeat_ngram_size': 3}]",
        "test_beams_are_those_of_transformers[{'bad_words*",
        "test_beams_are_those_of_transformers[{'forced_eos_token_id': 5}]",
        "test_beams_are_those_of_transformers[{'repetition_penalty': 0.7}]",
        # beams, or several of them at once, are asked the same
        *(
            f"test_greedy_answers_are_those_of_transformers[{{{option}}}]"
            for option in (
                "'forced_bos_token_id': 5",
                "'forced_eos_token_id': 7",
                "'forced_eos_token_id': [11, 7]",
                "'max_length': 40",
                "'max_new_tokens': 5",
                "'no_repeat_ngram_size': 2",
                "'repetition_penalty': 1.4",
            )
        ),
    ),
    "tests/serve/test_segment.py": ("test_a_worker_that_dies_while_it_looks",),
    "tests/trust/test_requests.py": ("test_a_thousand_requests_given_up_midway_leave_nothing",),
    "tests/weights/test_rptq.py": (
        "test_several_columns_of_a_channel_add_up_to_one_number_of_more_levels[*-3]",
        "test_several_columns_of_a_channel_add_up_to_one_number_of_more_levels[*-4]",
    ),
    "tests/models/test_family_gguf.py": (
        *(
            f"test_a_gguf_is_accepted_and_computes_the_same[{name}]"
            for name in (
                "hunyuan_v1_dense",
                "bitnet",
                "exaone",
                "lfm2_moe",
                "mellum",
                "xverse",
                "smollm3",
                "arcee",
                "jais2",
                "seed_oss",
                "cohere",
                "olmo",
                "glm",
            )
        ),
        *(
            f"test_other_files_of_dense_families[{name}-*"
            for name in ("arcee", "cohere", "nemotron", "olmo", "seed_oss")
        ),
        "test_a_phi3_with_one_list_of_factors[short]",
        *(
            f"test_a_gguf_is_accepted_and_computes_the_same[{name}]"
            for name in ("kimi_k2", "solar_open", "granitemoeshared", "granite_swa")
        ),
        "test_baichuan_with_40_layers_has_alibi",
        "test_a_nemotron_h_without_experts",
        "test_keys_of_the_newest_families_that_do_not_fit[lfm2_moe-*",
        "test_keys_of_the_newest_families_that_do_not_fit[hy_v3-*",
        "test_numbers_of_an_activation_that_do_not_fit[values[1-3]]",
        # other switches of theirs go the same way, here and in test_expert_gguf.py
        *(
            f"test_a_gguf_is_accepted_and_computes_the_same[{name}]"
            for name in ("exaone4", "granitemoehybrid", "mamba2", "minimax_m2", "olmo3")
        ),
    ),
    "tests/models/test_expert_gguf.py": (
        *(
            f"{test}[{name}*"
            for test in ("test_other_switches", "test_integers_of_experts_are_kept")
            for name in ("dots1", "exaone_moe", "sarvam_moe", "solar_open", "granitemoeshared")
        ),
        *(
            f"test_scaled_positions[{name}-*"
            for name in ("granite_swa", "granite", "granitemoeshared", "ernie4_5_moe", "dots1")
        ),
        "test_every_nth_layer_has_no_window[exaone_moe*",
    ),
    "tests/checkpoint/test_gguf_gemma4.py": (
        # tests/models/test_family_gguf.py has the experts
        "test_a_file_in_the_shape_of_a_release[26B-A4B]",
    ),
    "tests/ops/test_routed_moe.py": (
        # native has all; a dtype's loads and stores are those of the experts' own kernels
        "test_one_call_is_to_the_bit_what_the_single_ops_are[avx2-torch.*float16-*",
        "test_one_call_is_to_the_bit_what_the_single_ops_are[plain-torch.*float16-*",
    ),
    "tests/ops/test_cpu_experts.py": (
        # the same
        "test_columns_that_end_within_a_block_or_group[avx2-torch.*float16]",
        "test_columns_that_end_within_a_block_or_group[plain-torch.*float16]",
    ),
    "tests/ops/test_wq_gemm_small_m_emulated.py": (
        # of 4 and of 8 bits, one with and one without a gate stay: they see what the others see
        "test_the_emulation_sees_mistakes*",
        "test_products[case[01]]",
        "test_products[case4]",
    ),
    "tests/ops/test_add_rms_norm_router_emulated.py": ("test_the_emulation_sees_mistakes*",),
    "tests/trust/test_forged_tensors.py": (
        "test_any_header_is_an_engine_or_one_line[bfloat16]",
        "test_any_header_is_an_engine_or_one_line[rptq]",
    ),
    # another length penalty
    "tests/runtime/test_beam_search.py": ("test_results_and_scores[2]",),
    "tests/runtime/test_window_pages.py": (
        # windows of 1, 20 and 33 tokens stay
        "test_memory_is_bounded_by_the_window[5-*",
        "test_memory_is_bounded_by_the_window[20-*-False]",
    ),
    "tests/runtime/test_cuda_graphs.py": (
        "test_mixed_steps_by_graph_give_the_same_tokens[*-None-False]",
    ),
    "tests/text/test_begun_messages.py": (
        # the same template, and every third place of a message
        "test_same_ids_as_transformers[*-qwen2.5]",
        *(f"test_a_prompt_ends_inside_the_last_message[{n}]" for n in range(21) if n % 3),
    ),
    "tests/text/test_answer_splice.py": ("test_arguments_keep_their_form[*-qwen2.5]",),
    "tests/test_full_only.py": (
        "test_every_pattern_matches_a_test",
        "test_a_test_that_is_left_out_in_part_keeps_a_case",
        "test_every_op_and_backend_keeps_a_case",
    ),
}


def pattern_expression(pattern: str) -> re.Pattern[str]:
    """``*``: any characters; ``[12]`` or ``[1-5]`` behind a letter or digit: one such digit."""
    parts = re.split(r"(\*|(?<=\w)\[\d-?\d\](?=\]))", pattern)
    return re.compile(
        "".join(
            ".*" if part == "*" else part if index % 2 else re.escape(part)
            for index, part in enumerate(parts)
        )
    )


EXHAUSTIVE_ONLY: Mapping[str, Sequence[str]] = {
    # of a family without a shape of its own, what another family's tests see as well
    "tests/models/test_dense_families.py": (
        "test_every_recipe_is_built_and_accepted[further-*-bfloat16-int8]",
        "test_every_recipe_is_built_and_accepted[further-*-bfloat16-fp8]",
        "test_every_recipe_is_built_and_accepted[further-*-bfloat16-int4]",
        "test_every_recipe_is_built_and_accepted[further-*-bfloat16-smoothquant]",
        "test_every_recipe_is_built_and_accepted[further-*-bfloat16-rptq]",
        "test_a_planted_fault_is_refused_by_name[further-*-float32-int8]",
        "test_a_planted_fault_is_refused_by_name[further-*-float32-fp8]",
        "test_a_planted_fault_is_refused_by_name[further-*-float32-int4]",
        "test_a_planted_fault_is_refused_by_name[further-*-float32-smoothquant]",
        "test_a_planted_fault_is_refused_by_name[further-*-float32-rptq]",
        # the bounds of bfloat16 are every family's; the representatives keep it
        "test_a_planted_fault_is_refused_by_name[further-*-bfloat16-none]",
    ),
    # each fault in every recipe, half of them in float32 and half in bfloat16, are left
    **dict.fromkeys(
        (path for path in FULL_ONLY if path.endswith("_faults.py") and "/models/" in path),
        ("*[further-*",),
    ),
    "tests/builder/test_config_only.py": (
        "test_parameters_are_those_that_the_authors_count[Qwen3-Next-80B-A3B]",
    ),
}
"""Tests that only ``make test-families`` runs, so that ``make test-all`` stays within its time."""


def is_exhaustive_only(node_id: str) -> bool:
    """Whether ``make test-all`` leaves a test out; ``node_id``: as pytest prints it."""
    return _is_listed(EXHAUSTIVE_ONLY, node_id)


def is_full_only(node_id: str) -> bool:
    """Whether ``make test`` leaves a test out; ``node_id``: as pytest prints it."""
    return _is_listed(FULL_ONLY, node_id)


def _is_listed(patterns: Mapping[str, Sequence[str]], node_id: str) -> bool:
    path, _, name = node_id.partition("::")
    return any(each.fullmatch(name) for each in _expressions(tuple(patterns.get(path, ()))))


@cache
def _expressions(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(pattern_expression, patterns))
