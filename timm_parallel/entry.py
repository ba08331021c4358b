"""Command line of train.py: train, sweep, or print help.

This process composes and checks the config once. It then starts the ranks as separate processes.
Each rank reads the saved config from the run folder (timm_parallel/launch/).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from timm_parallel.app import App
from timm_parallel.cluster.slurm import check_scheduler, submit
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command, hydra_files, load_config, store_schema
from timm_parallel.config.resolve import notice, resolve
from timm_parallel.data.build import check_batch, check_data, check_root
from timm_parallel.launch.job import record_end, run_job
from timm_parallel.launch.resume import (
    check_resumable,
    compose_run,
    folder_to_resume,
    keep_chosen,
    records_of,
    restore_records,
)
from timm_parallel.launch.torchrun import (
    negotiate,
    refuse_followers,
    remembered_folder,
    run_follower,
    run_rank_zero,
)
from timm_parallel.machine.files import claim_folder, lock_folder
from timm_parallel.machine.imports import import_name, slow_imports
from timm_parallel.machine.ranks import Ranks, ranks_from_environment, starter
from timm_parallel.machine.secrets import hide, mask
from timm_parallel.machine.signals import Stopped, exit_process, signal_handlers
from timm_parallel.machine.streams import keep_running_without_stdout
from timm_parallel.patches import any_help_text
from timm_parallel.record.console import print_config

# Function that runs sweeps. The library imports nothing of the lab, so it names the function.
MULTIRUN = "timm_parallel.lab.multirun.main"


def main(app: App) -> NoReturn:
    """Run the command line of train.py, and exit with its exit code."""
    keep_running_without_stdout()
    # torchrun starts this process as a rank, so exit as a rank does: without destructors that may
    # block.
    exit_process(run_command(app))


def run_command(app: App) -> int:
    """Train, sweep or print help, as the command line says. Return the exit code of train.py: 0
    done, 1 failed, 2 rejected command or config, 128 + N stopped by signal N.
    """
    script = Path(sys.argv[0]).name
    try:
        ranks = ranks_from_environment(os.environ)
        if ranks is not None and not ranks.is_first:
            return run_follower(ranks)
        # Under torchrun, leave the signal handlers to the code of the rank. Otherwise let a stop
        # signal raise Stopped. A sweep that has not written its jobs yet then removes its folder.
        with contextlib.nullcontext() if ranks else signal_handlers(_stop):
            try:
                return _lead(app, ranks)
            except ValueError as error:
                # The other ranks wait for a config.
                if ranks is not None:
                    refuse_followers(ranks, mask(str(error)))
                raise
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
    except Stopped as stop:
        print(f"{script}: stopped by {stop}", file=sys.stderr)
        return 128 + stop.number
    # Ctrl-C before the code of a rank installs its handlers, under torchrun or srun.
    except KeyboardInterrupt:
        print(f"{script}: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # Later signals raise too, because native code that imports numpy may drop the first exception.
    raise Stopped(number)


def _lead(app: App, ranks: Ranks | None) -> int:
    """Parse the command line and carry it out, as rank 0 or as the only process."""
    arguments = parse_command_line(sys.argv[1:])
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
    if not arguments.multirun:
        return _run(arguments, ranks)
    if ranks is not None:
        raise ValueError(
            "--multirun: a sweep starts its own ranks; run python train.py -m … without "
            f"{starter()}"
        )
    return int(import_name(MULTIRUN)(arguments))


def _run(arguments: Any, ranks: Ranks | None) -> int:
    """Compose and check the config, create or reopen the run folder, and start the ranks. Under
    torchrun this process is rank 0 and trains itself. Return the exit code.
    """
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
    with slow_imports():
        from timm_parallel.checked_configs import check_task

        check_task(config)
    if is_local:
        check_data(config)
        check_batch(config)
    if line := notice(command.config, config):
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
    with lock_folder(folder):
        try:
            records = records_of(folder)
            if is_resumed:
                check_resumable(config, folder)
            if config.print_config:
                print_config(command.config, config)
            with hydra_files(command, folder) as here:
                if ranks is None:
                    code = run_job(config, here)
                else:
                    code = run_rank_zero(config, here, ranks)
            if is_resumed and code == 2:
                restore_records(folder, records)
        except Stopped as stop:
            # The signal arrived before the first rank started or after the last rank ended, so no
            # other code records the interruption.
            if not (folder / "result.json").exists():
                record_end(config, folder, "interrupted", f"stopped by {stop}")
            raise
    return code or submit(config, folder)


def _show_with_hydra(app: App, arguments: Any) -> int:
    """Let Hydra print the output of --help, --hydra-help, --cfg, --info or shell completion. Return
    exit code 0.
    """
    import hydra

    chosen = (
        arguments.overrides,
        arguments.config_path,
        arguments.config_name,
        arguments.config_dir,
    )
    if not (arguments.shell_completion or (arguments.help and not any(chosen))):
        # Compose and check the config first. An invalid config is then rejected in one line, before
        # Hydra imports a class that the config names. A plain --help needs no config.
        is_sweep = arguments.multirun or not arguments.cfg
        compose_command(argparse.Namespace(**{**vars(arguments), "multirun": is_sweep}))
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
