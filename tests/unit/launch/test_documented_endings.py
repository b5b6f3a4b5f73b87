"""Every row of the tables in docs/troubleshooting.md and docs/recovery.md, and the tests of what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ENDINGS = {
    "training finished": [
        "launch/test_training.py::test_training_shows_its_own_lines_only_and_resumes_where_it_was"
    ],
    "invalid JSON, flags, data or sizes": [
        "launch/test_bad_input.py::test_fault_in_the_json",
        "launch/test_bad_input.py::test_fault_in_the_flags",
        "launch/test_bad_input.py::test_launchers_show_it_once",
    ],
    "ranks with different JSON, flags, data or code": [
        "launch/test_roll_call.py::test_scripts_refuse_a_rank_that_differs"
    ],
    "a checkpoint was not saved": [
        "launch/test_save.py::test_a_save_that_fails_is_reported_and_training_goes_on"
    ],
    "an audit finds different bits (`audit_interval`)": [
        "distributed/test_audit.py::test_a_flipped_bit_is_found_in_the_audited_step"
    ],
    "10 consecutive steps with non-finite losses or gradients": [
        "launch/test_save.py::test_a_run_whose_loss_is_not_finite_says_so_and_keeps_its_last_checkpoint"
    ],
    "exception in a rank": ["launch/test_endings.py::test_exception_is_told_first_and_in_full_once"],
    "an audit finds a layer that does not repeat itself": [
        "distributed/test_audit.py::test_state_of_a_layer_is_no_fault_of_a_host"
    ],
    "rank killed (out of memory, `kill -9`)": ["launch/test_endings.py::test_killed_rank_is_named"],
    "rank killed before the ranks have joined": [
        "unit/launch/test_process.py::test_a_rank_that_has_not_joined_leaves_the_cause_to_others"
    ],
    "host or network down": [
        "launch/test_cut_cable.py::test_host_behind_a_cut_cable_is_lost",
        "hosts/test_failures.py::test_failure_ends_all_hosts",
    ],
    "rank hangs": ["launch/test_endings.py::test_stuck_rank_is_named_after_the_time_limit"],
    "killed build of a torch extension": [
        "unit/engine/test_extension_lock.py::test_a_lock_is_named_before_the_wait"
    ],
    "launcher killed, also while the ranks import": [
        "launch/test_endings.py::test_killed_launcher_takes_its_ranks_along",
        "launch/test_endings.py::test_a_rank_that_another_orphan_ends_says_why",
        "launch/test_endings.py::test_launcher_that_is_killed_while_its_ranks_import",
    ],
    "wrapper of a rank killed, or ended by the launcher before its rank": [
        "unit/launch/test_processes.py::test_a_wrapper_that_exits_before_its_rank_and_the_launcher"
    ],
    "Ctrl-C": ["launch/test_endings.py::test_interrupt_ends_every_rank"],
    "the terminal is closed (SIGHUP, not with `nohup`)": [
        "unit/launch/test_process.py::test_signals_end_a_rank_with_a_blocked_main_thread"
    ],
    "SIGTERM (from a batch system or the launcher)": [
        "unit/launch/test_process.py::test_signals_end_a_rank_with_a_blocked_main_thread"
    ],
    "SIGTERM, SIGUSR1 or the end of the launcher with `--exit-signal-handler`": [
        "launch/test_stops.py::test_a_signal_in_a_rank",
        "launch/test_stops.py::test_a_signal_to_the_launcher",
    ],
    "`--exit-duration-in-mins` or `--exit-interval`": ["launch/test_stops.py::test_limits"],
}
SURVIVALS = {
    "one or more ranks, at any moment": [
        "launch/test_recovery.py::test_every_kill_ends_with_the_same_weights",
        "launch/test_recovery.py::test_kills_at_random_moments",
    ],
    "a host with its memory": [
        "hosts/test_recovery.py::test_a_lost_host_comes_back_empty",
        "hosts/test_recovery.py::test_a_host_lost_while_its_copies_are_late",
    ],
    "two hosts that have each other's copies": [
        "hosts/test_recovery.py::test_two_lost_hosts_with_each_others_copies"
    ],
    "the process that keeps the snapshots": [
        "distributed/test_keeper.py::test_a_killed_keeper_is_reported_and_started_again"
    ],
    "all snapshots of a rank": [
        "launch/test_runs.py::test_a_restart_continues_only_from_checkpoints_of_its_run",
        "launch/test_recovery.py::test_an_own_script_below_a_wrapper_recovers_or_says_what_it_lost",
    ],
    "all ranks, after SIGTERM or SIGUSR1 with `--exit-signal-handler` "
    "([how](troubleshooting.md#end-a-run-with-its-work-saved))": [
        "launch/test_stops.py::test_a_signal_in_a_rank"
    ],
    "all ranks, at a deadline or after `--exit-interval` steps": ["launch/test_stops.py::test_limits"],
    "all ranks, while a checkpoint is written, also with `--async-save`": [
        "launch/test_kill_and_resume.py::test_a_rank_killed_at_random_moments",
        "launch/test_background_save.py::test_a_rank_that_is_killed_takes_its_writer_along",
    ],
    "the host of the rendezvous, or all hosts": [
        "hosts/test_recovery.py::test_the_lost_host_of_the_rendezvous",
        "launch/test_kill_and_resume.py::test_a_rank_killed_at_random_moments",
    ],
}


@pytest.mark.parametrize(
    ("page", "header", "rows"),
    [("troubleshooting.md", "| event |", ENDINGS), ("recovery.md", "| lost |", SURVIVALS)],
)
def test_every_row_has_a_test(page: str, header: str, rows: dict[str, list[str]]) -> None:
    _, _, table = (ROOT / "docs" / page).read_text().partition(header)
    lines = table.split("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(rows)
    for file, _, name in (test.partition("::") for tests in rows.values() for test in tests):
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)
