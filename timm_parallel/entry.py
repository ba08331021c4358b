"""Command line of train.py: train, sweep, or print help.

This process composes and checks the config once. It then starts the ranks as separate processes.
Each rank reads the saved config from the run folder (timm_parallel/launch/).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from timm_parallel.app import App
from timm_parallel.machine.imports import import_name
from timm_parallel.machine.ranks import Ranks, ranks_from_environment, starter
from timm_parallel.machine.secrets import hide, mask
from timm_parallel.machine.signals import exit_process, signal_handlers
from timm_parallel.machine.streams import keep_running_without_stdout

# Function that runs sweeps. The library imports nothing of the lab, so it names the function.
MULTIRUN = "timm_parallel.lab.multirun.main"


def main(app: App[Any, Any]) -> NoReturn:
    """Run the command line of train.py, and exit with its exit code."""
    keep_running_without_stdout()
    # torchrun starts this process as a rank, so exit as a rank does: without destructors that may
    # block.
    exit_process(run_command(app))


def run_command(app: App[Any, Any]) -> int:
    """Train, sweep or print help, as the command line says. Return the exit code of train.py: 0
    done, 1 failed, 2 rejected command or config, 128 + N stopped by signal N.
    """
    script = Path(sys.argv[0]).name
    try:
        ranks = ranks_from_environment(os.environ)
        if ranks is not None and not ranks.is_first:
            from timm_parallel.launch.torchrun import run_follower

            return run_follower(app.train, ranks)
        # Under torchrun, leave the signal handlers to the code of the rank. Otherwise let a stop
        # signal raise KeyboardInterrupt.
        with contextlib.nullcontext() if ranks else signal_handlers(_interrupt):
            return _lead(app, ranks)
    except ValueError as error:
        print(f"{script}: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    # Handle a file error outside of a run, such as a full disk or a deleted sweep folder. A run
    # reports its own errors.
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{script}: {mask(str(error))}", file=sys.stderr)
        return 1
    # A stop signal can arrive here only before or after a run, because a run handles stop signals
    # itself.
    except KeyboardInterrupt as interrupt:
        number = _signal_of(interrupt)
        print(f"{script}: stopped by {number.name}", file=sys.stderr)
        return 128 + number


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a stop signal by raising KeyboardInterrupt. A sweep that is interrupted before it has
    written its jobs can then remove its folder.
    """
    raise KeyboardInterrupt(number)


def _signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    return signal.Signals(interrupt.args[0] if interrupt.args else signal.SIGINT)


def _lead(app: App[Any, Any], ranks: Ranks | None) -> int:
    """Parse the command line and carry it out, as rank 0 or as the only process. If the command
    line is rejected, tell the reason to the other ranks, which wait for a config.
    """
    try:
        arguments = _parse(sys.argv[1:])
        if arguments.experimental_rerun is not None:
            raise ValueError(
                "--experimental-rerun: unpickles a file, which may run any code; use "
                "--config-path <run folder>"
            )
        if any(
            (
                arguments.help,
                arguments.hydra_help,
                arguments.cfg,
                arguments.info,
                arguments.shell_completion,
            )
        ):
            return _show_with_hydra(app, arguments)
        return (_sweep if arguments.multirun else _run)(app, arguments, ranks)
    except ValueError as error:
        if ranks is not None:
            from timm_parallel.launch.torchrun import refuse_followers

            refuse_followers(ranks, mask(str(error)))
        raise


def _parse(command_line: list[str]) -> Any:
    from timm_parallel.config.suggest import key_hint
    from timm_parallel.patches import hydra_parser

    def refuse(message: str) -> NoReturn:
        # torch.distributed.launch adds --local-rank to the command line of every script that it
        # starts.
        if re.search(r"--local[-_]rank", message):
            raise ValueError(
                "--local-rank: torch.distributed.launch is not supported; "
                "start the ranks with torchrun --nproc-per-node N train.py parallel=ddp"
            )
        # Explain the first argument that starts with a dash and is not an option of Hydra, such as
        # --lr=0.1. An unambiguous prefix of an option is valid, because argparse accepts
        # abbreviations.
        options = list(parser._option_string_actions)
        for word in command_line:
            name = word.partition("=")[0]
            if not re.match("--?[a-z]", word) or name in options:
                continue
            is_abbreviation = len([option for option in options if option.startswith(name)]) == 1
            if not is_abbreviation and (suggestion := key_hint(name.lstrip("-").replace("-", "_"))):
                message = f"{word}: no such option; keys have no dashes in front{suggestion}"
                break
        raise ValueError(f"{message}; python train.py --help lists the valid arguments")

    parser = hydra_parser()
    # Raise an error with a one-line message, where argparse would print its usage and exit.
    parser.error = refuse  # type: ignore[method-assign]
    # Use the intermixed parser, because overrides may stand before and after a flag: `model=tiny -m
    # seed=1,2`.
    return parser.parse_intermixed_args(command_line)


def _run(app: App[Any, Any], arguments: Any, ranks: Ranks | None) -> int:
    """Compose and check the config, create or reopen the run folder, and start the ranks. Under
    torchrun this process is rank 0 and trains itself. Return the exit code.
    """
    from timm_parallel.cluster.slurm import check_scheduler, submit
    from timm_parallel.config.compose import load_config, run_in_hydra
    from timm_parallel.config.resolve import notices, resolve
    from timm_parallel.data.build import check_batch, check_data, check_root
    from timm_parallel.launch.job import record_interruption, run_job
    from timm_parallel.launch.resume import (
        check_resumable,
        compose_run,
        folder_to_resume,
        keep_chosen,
        records_of,
        restore_records,
    )
    from timm_parallel.launch.torchrun import negotiate, remembered_folder, run_rank_zero
    from timm_parallel.machine.files import claim_folder, lock_folder
    from timm_parallel.machine.imports import imports_without_gc
    from timm_parallel.record.console import print_config

    remembered = remembered_folder(ranks)
    command = compose_run(arguments, remembered)
    config = resolve(command.config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))
    # Check the data only for a run on this machine. A cluster job checks the data on its own node,
    # where the paths may differ.
    is_local = config.cluster.scheduler == "local"
    if is_local:
        check_root(config)
    # Import the rules of the task only after all checks that need no torch, because the import of a
    # task takes seconds.
    with imports_without_gc():
        from timm_parallel.checked_configs import check_task

        check_task(config)
    if is_local:
        check_data(config)
        check_batch(config)
    for line in notices(command.config, config, ranks.world_size if ranks else None):
        print(line, flush=True)
    if ranks is not None:
        negotiate(config, command.config.parallel, ranks)
    check_scheduler(config.cluster)
    folder = remembered or folder_to_resume(config, command.config)
    is_resumed = folder is not None
    if folder is not None:
        config = keep_chosen(
            config, load_config(folder), divides_batch=command.config.train.accumulate == "auto"
        )
    folder = folder or claim_folder(command.run_dir)
    is_ours = not is_resumed
    try:
        with lock_folder(folder):
            is_ours = True
            records = records_of(folder)
            if is_resumed:
                check_resumable(config, folder)
            if config.print_config:
                print_config(command.config, config)
            if ranks is not None:
                code = run_in_hydra(
                    command, folder, lambda here: run_rank_zero(app.train, config, here, ranks)
                )
            else:
                code = run_in_hydra(command, folder, lambda here: run_job(config, here))
            if is_resumed and code == 2:
                restore_records(folder, records)
    except KeyboardInterrupt as interrupt:
        # The signal arrived before the first rank started or after the last rank ended, so no other
        # code records the interruption.
        if is_ours:
            record_interruption(config, folder, _signal_of(interrupt))
        raise
    if ranks is not None:
        return code
    return code or submit(config, folder)


def _sweep(app: App[Any, Any], arguments: Any, ranks: Ranks | None) -> int:
    """Run a sweep (--multirun): compose the configs of all jobs first, then run each job in
    separate processes. Return the exit code.
    """
    if ranks is not None:
        raise ValueError(
            "--multirun: a sweep starts its own ranks; run python train.py -m … without "
            f"{starter()}"
        )
    return int(import_name(MULTIRUN)(arguments))


def _show_with_hydra(app: App[Any, Any], arguments: Any) -> int:
    """Let Hydra print the output of --help, --hydra-help, --cfg, --info or shell completion. Return
    exit code 0.
    """
    import hydra

    from timm_parallel.config.compose import compose_command, store_schema
    from timm_parallel.patches import any_help_text

    chosen = (
        arguments.overrides,
        arguments.config_path,
        arguments.config_name,
        arguments.config_dir,
    )
    if not (arguments.shell_completion or (arguments.help and not any(chosen))):
        # Compose and check the config first. An invalid config is then rejected in one line, before
        # Hydra imports a class that the config names. A plain --help needs no config.
        composed = argparse.Namespace(
            **{**vars(arguments), "multirun": arguments.multirun or not arguments.cfg}
        )
        compose_command(composed)
    store_schema()

    def task(tree: Any) -> None:
        return None

    # Set module and file of the function to those of train.py, because Hydra derives the name of
    # the task and the folder conf/ from them.
    task.__module__ = "__main__"
    task.__code__ = task.__code__.replace(co_filename=str(app.root / "train.py"))
    shown = io.StringIO()
    try:
        # Capture Hydra's output, because --resolve prints the values of secrets.
        with contextlib.redirect_stdout(shown), any_help_text():
            hydra.main(version_base="1.3", config_path="conf", config_name="train")(task)()
    finally:
        print(hide(shown.getvalue()), end="")
    return 0
