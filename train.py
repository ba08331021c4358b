"""Train a timm model: `python train.py [key=value …]`, or the same under torchrun. See --help.

Short on purpose: the command line is composed and checked before torch is imported, once; then ranks start as processes
of their own and read the frozen config of their run folder (src/engine/launch/). What a run does stands in src/run/lifecycle.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from typing import Any, NoReturn

from src.engine.machine.process import leave
from src.engine.machine.ranks import Ranks, ranks_from_environment
from src.engine.machine.secrets import hide, mask
from src.run import run


def main() -> int:
    """Returns the exit code: 0 done, 1 failed, 2 refused, 128 + signal when stopped by one."""
    try:
        ranks = ranks_from_environment(os.environ)
        if ranks is not None and not ranks.is_first:
            from src.engine.launch.torchrun import follow

            return follow(run, ranks)
        return _lead(ranks)
    except ValueError as error:
        print(f"train.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2


def _lead(ranks: Ranks | None) -> int:
    """Rank 0, or the only process. What it refuses, the other ranks are told, because they wait for a run folder."""
    try:
        arguments = _parse(sys.argv[1:])
        if arguments.experimental_rerun is not None:
            raise ValueError(
                "--experimental-rerun: unpickles a file, which may run anything; use --config-path <run folder>"
            )
        if any((arguments.help, arguments.hydra_help, arguments.cfg, arguments.info, arguments.shell_completion)):
            return _hydra_habits(arguments)
        return (_sweep if arguments.multirun else _run)(arguments, ranks)
    except ValueError:
        if ranks is not None:
            from src.engine.launch.torchrun import refuse_followers

            refuse_followers(ranks)
        raise


def _parse(command_line: list[str]) -> Any:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        if re.search(r"--local[-_]rank", message):  # torch.distributed.launch hands it to every script
            raise ValueError(
                "--local-rank: torch.distributed.launch is out of date; "
                "start the ranks with torchrun --nproc-per-node N train.py parallel=ddp"
            )
        raise ValueError(f"{message}; see python train.py --help")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]  # one line, where argparse prints its usage first
    return parser.parse_intermixed_args(command_line)  # `model=tiny -m seed=1,2`: overrides on both sides of a flag


def _run(arguments: Any, ranks: Ranks | None) -> int:
    """One run: compose, check, claim or reopen the run folder, start the ranks (or, under torchrun, be rank 0)."""
    from src.data.folders import check_data
    from src.engine.config.compose import compose_command, run_in_hydra
    from src.engine.config.resolve import remarks, resolve
    from src.engine.launch.job import run_job
    from src.engine.launch.resume import check_resumable, folder_to_resume, with_saved_overrides
    from src.engine.launch.slurm import check_scheduler, submit
    from src.engine.launch.torchrun import agree, lead, remembered_folder
    from src.engine.machine.files import claim_folder
    from src.engine.machine.lock import own

    command = compose_command(with_saved_overrides(arguments))
    if command.config.cluster.scheduler == "local":  # elsewhere, the job looks for itself
        check_data(command.config.data)
    config = resolve(command.config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))
    for line in remarks(command.config, config, ranks.world_size if ranks else None):
        print(line, flush=True)
    if ranks is not None:
        agree(config, command.config.parallel, ranks)
    check_scheduler(config.cluster)
    folder = remembered_folder(ranks) or folder_to_resume(config)
    goes_on = folder is not None
    folder = folder or claim_folder(command.run_dir)
    with own(folder):
        if goes_on:
            check_resumable(config, folder)
        if ranks is not None:
            return run_in_hydra(command, folder, lambda: lead(run, config, folder, ranks))
        code = run_in_hydra(command, folder, lambda: run_job(config, folder))
    return code or submit(config, folder)


def _sweep(arguments: Any, ranks: Ranks | None) -> int:
    """--multirun: all jobs composed first, then run one by one, each in processes of its own."""
    from src.data.folders import training_size
    from src.engine.sweep.sweep import run_sweep

    if ranks is not None:
        raise ValueError("--multirun: a sweep starts its own ranks; run it with python train.py -m …, without torchrun")
    return run_sweep(arguments, training_size)


def _hydra_habits(arguments: Any) -> int:
    """--help, --cfg, --info and shell completion, as Hydra does them."""
    import hydra

    from src.engine.config.compose import VERSION_BASE, compose_command, store_schema

    chosen = (arguments.overrides, arguments.config_path, arguments.config_name, arguments.config_dir)
    if not (arguments.shell_completion or (arguments.help and not any(chosen))):
        # Refused in one line, and before Hydra imports what a config names. A bare --help has nothing to refuse.
        compose_command(argparse.Namespace(**{**vars(arguments), "multirun": arguments.multirun or not arguments.cfg}))
    store_schema()
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):  # --resolve shows what secrets stand for
            hydra.main(version_base=VERSION_BASE, config_path="conf", config_name="train")(lambda tree: None)()
    finally:
        print(hide(shown.getvalue()), end="")
    return 0


if __name__ == "__main__":
    leave(main())  # under torchrun, this is a rank
