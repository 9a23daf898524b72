"""Tests that cannot hold on the emulated device, by the reason; `plugin.py` applies all of it.

A pattern is the beginning of a test's id, without what is in brackets unless it is given: `tests/a/test_b.py` stands
for the file, and `tests/a/test_b.py::test_c` for all parameters of that test.
"""

from __future__ import annotations

Tests = dict[str, tuple[str, ...]]

# Skipped.
NOT_HERE: Tests = {
    "CUDA graphs": ("tests/stores/test_transfers.py::test_in_a_captured_graph_it_is_refused",),
    "Inductor and Triton on the device": (
        "tests/regions/test_region.py::test_with_compiled_blocks",
        "tests/stores/test_narrowing.py::test_compiled_code_has_no_breaks_and_no_new_versions",
        "tests/regions/test_wrapping_stores.py::test_a_compiled_model_in_one_graph_raises",
    ),
    "NCCL": ("tests/regions/test_wrapping.py::test_distributed_data_parallel",),
    "kernels of the CPU answer NaN in another way than those of a device": tuple(
        f"tests/stores/test_needs.py::test_derivatives_do_not_notice_on_a_device[{node}Backward0-"
        for node in ("Hardshrink", "Hardtanh", "Softshrink")
    ),
    "the CPU has no kernel for halves": (
        "tests/stores/test_needs.py::test_derivatives_do_not_notice_on_a_device[AvgPool3DBackward0-0]",
    ),
    "sparse tensors": ("tests/stores/test_needs.py::test_derivatives_do_not_notice_on_a_device[GatherBackward0-1]",),
    "more arithmetic than the CPU does in a minute": (
        "tests/pipeline/test_recorder.py::test_events_on_two_streams_of_a_device",
    ),
}

# These may have races.
RACES_ON_PURPOSE: Tests = {
    "they write in place while a copy is pending, which the library has to find": (
        "tests/policies/test_policies_in_regions.py::test_views_that_count_apart_and_are_written_after_the_region",
        "tests/regions/test_fuzz.py::test_random_programs_agree_with_the_plain_run_or_are_refused",
        "tests/stores/test_transfers.py::test_a_write_in_place_before_the_copy_has_ended_is_an_error",
    ),
}

# With the device as torch's default one, a test that was not written for it fails with one of these: it is skipped.
ERRORS_OF_THE_TEST = {
    r"Expected a 'cuda' device type for generator but found 'cpu'": "makes generators of the CPU",
}

# What runs with the device as torch's default one, beside what is marked `gpu`.
BY_DEFAULT = ("tests/emulator", "tests/pipeline", "tests/policies", "tests/regions", "tests/stores")

# Skipped with the device as torch's default one, beside all of the above. So `make emulated` keeps to five minutes.
NOT_BY_DEFAULT: Tests = {
    "is about Dynamo and takes minutes": (
        "tests/regions/test_compile.py",
        "tests/regions/test_compiled_autograd.py",
        "tests/regions/test_higher_order.py",
        "tests/stores/test_compiled_autograd.py",
    ),
    "computes on the host, or starts processes, whatever the device": (
        "tests/pipeline/attaching",
        "tests/regions/test_forwards.py::test_accelerate_itself",
        "tests/stores/test_disk_faults.py",
    ),
    "plans for a percentage of the plain peak that is less than the workspaces of the device": (
        "tests/pipeline/skip/test_plans.py::test_a_plan_is_exact_and_within_its_budget",
        "tests/regions/test_forwards.py::test_a_model_that_accelerate_prepares_and_unwraps",
        "tests/regions/test_world_hooks.py::test_a_plan_nests_what_it_has_tried",
    ),
    "expects all stages of a pipe on one device": ("tests/pipeline/test_unet.py",),
    "names tensors of the CPU": (
        "tests/pipeline/balance/test_time.py",
        "tests/pipeline/skip/test_portals.py::test_between_devices",
        "tests/pipeline/skip/test_skippables.py::test_copies_and_pickles",
        "tests/pipeline/skip/test_writes.py",
        "tests/pipeline/test_pipe.py",
        "tests/policies/test_policies_in_regions.py::test_a_name_of_memory_that_no_operator_has_filled",
        "tests/policies/test_policies_in_regions.py::test_memory_of_zeros_that_is_filled_by_what_torch_does_not_see",
        "tests/policies/test_policies_under_modes.py::test_a_plan_is_the_same_whether_a_flop_counter_is_on",
        "tests/policies/test_policies_under_modes.py::test_a_plan_with_operators_under_a_flop_counter",
        "tests/regions/test_diagnosis.py::test_autocast_by_a_flag",
        "tests/regions/test_diagnosis.py::test_the_flags_of_hidden_modules_are_as_before",
        "tests/regions/test_diagnosis.py::test_the_message_leaves_no_trace",
        "tests/regions/test_past_versions.py::test_a_large_buffer_that_a_later_forward_writes[by_numpy]",
        "tests/regions/test_values.py::test_a_verdict_outside_of_any_backward_comes_at_once",
        "tests/regions/test_values.py::test_numpy_draws_are_found_and_the_entry_is_recommended",
        "tests/regions/test_values.py::test_where_reading_waits_the_verdict_comes_at_the_end_of_backward",
        "tests/stores/test_disk.py::test_a_write_past_the_version_counter_on_the_way_is_an_error_and_no_data",
    ),
    "threads of the test have no default device": (
        "tests/regions/test_threads.py::test_a_session_in_each_thread",
        "tests/regions/test_threads.py::test_regions_of_one_thread_go_backward_in_another",
        "tests/regions/test_threads.py::test_two_regions_that_share_modules_in_opposite_order",
        "tests/stores/test_catalog.py::test_threads_that_pack_and_go_backward_at_once",
    ),
    "backward runs in autograd's thread of the device, which is one for all and lets go of a graph a moment later": (
        "tests/pipeline/skip/test_regions.py::test_regions_go_without_the_collector",
        "tests/regions/test_cuts.py::test_what_fails_in_a_later_part_leaves_nothing_behind",
        "tests/regions/test_diagnosis.py::test_a_message_leaves_no_region_behind",
        "tests/regions/test_engine.py::test_a_dropped_graph_frees_its_inputs_and_regions",
        "tests/regions/test_frames.py",
        "tests/regions/test_func.py::test_what_a_region_saves_is_dropped_and_goes_with_the_transform",
        "tests/regions/test_leaks.py",
        "tests/regions/test_region.py::test_a_region_goes_as_soon_as_its_nodes_have_run",
        "tests/regions/test_region.py::test_an_in_place_operation_on_an_input_makes_no_cycle",
        "tests/regions/test_region.py::test_no_region_outlives_its_graph",
        "tests/regions/test_runs.py::test_an_error_in_the_middle_of_a_run_leaves_nothing_behind",
        "tests/regions/test_runs.py::test_no_region_outlives_a_planned_step",
        "tests/regions/test_sessions.py::test_no_region_outlives_its_session",
        "tests/regions/test_split_backward.py::test_nothing_outlives_a_session_of_its_own",
        "tests/regions/test_split_backward.py::test_what_a_recompute_made_goes_with_the_graph",
        "tests/regions/test_threads.py::test_a_node_that_another_thread_has_run_keeps_what_this_one_unpacked",
        "tests/regions/test_threads.py::test_a_recompute_that_waits_for_a_backward_in_another_thread",
        "tests/regions/test_world_hooks.py::test_nothing_outlives_its_graph",
    ),
    "expects words, sizes, operators or moments that are the CPU's": (
        "tests/regions/test_diagnosis.py::test_a_generator_that_is_not_preserved",
        "tests/regions/test_diagnosis.py::test_an_operator_that_no_line_of_the_user_calls_is_at_a_line_of_torch",
        "tests/regions/test_diagnosis.py::test_debug_shows_both_logs_from_where_they_part",
        "tests/regions/test_diagnosis.py::test_metadata",
        "tests/regions/test_diagnosis.py::test_too_few",
        "tests/regions/test_diagnosis.py::test_values_that_were_written_past_their_version",
        "tests/regions/test_engine.py::test_random_numbers_are_kept_only_where_they_were_drawn",
        "tests/regions/test_modules.py::test_a_buffer_that_a_later_forward_writes_through_data",
        "tests/regions/test_modules.py::test_a_script_module",
        "tests/regions/test_region.py::test_what_an_operation_saves_of_an_input_is_filled_already",
        "tests/regions/test_state_fuzz.py::test_random_programs_leave_the_world_of_the_plain_run",
        "tests/stores/test_catalog.py::test_a_tensor_that_is_written_after_it_was_saved_is_right_or_an_error",
        "tests/stores/test_catalog.py::test_storages_are_gone_after_the_forward",
        "tests/stores/test_codecs.py::test_a_second_value_that_comes_late",
        "tests/stores/test_codecs.py::test_a_third_value_anywhere_is_not_lost",
        "tests/stores/test_disk.py::test_a_tensor_written_in_place_before_it_is_in_the_file_is_an_error",
        "tests/stores/test_host.py::test_a_copy_that_fails_gives_its_bytes_back",
        "tests/stores/test_host.py::test_a_tensor_that_another_thread_writes_meanwhile_is_an_error",
        "tests/stores/test_host.py::test_the_value_is_that_at_the_time_of_put",
        "tests/stores/test_narrowing.py::test_an_operation_that_writes_what_it_has_saved",
        "tests/stores/test_tiers.py::test_a_strict_one_names_every_store_with_its_bytes",
    ),
    "sparse tensors": (
        "tests/stores/test_catalog.py::test_what_is_no_array_of_bytes_stays",
        "tests/stores/test_keep.py::test_any_tensor_can_be_kept",
    ),
}
