"""Public functions that read or start many runs: reports, verdicts, plans and checks of data and
machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm_parallel.public_names import attach

if TYPE_CHECKING:
    from timm_parallel.lab.curves import compare_curves as compare_curves
    from timm_parallel.lab.doctor import examine as examine
    from timm_parallel.lab.image_check import check_images as check_images
    from timm_parallel.lab.image_check import show_check as show_check
    from timm_parallel.lab.image_check import write_page as write_page
    from timm_parallel.lab.image_page import write_images as write_images
    from timm_parallel.lab.plan import Plan as Plan
    from timm_parallel.lab.plan import measure_step as measure_step
    from timm_parallel.lab.plan import show_plan as show_plan
    from timm_parallel.lab.report.report import write_report as write_report
    from timm_parallel.lab.reproduce import reproduce_run as reproduce_run
    from timm_parallel.lab.run_list import show_runs as show_runs
    from timm_parallel.lab.verdict.verdict import resume_verdict as resume_verdict
    from timm_parallel.lab.verdict.verdict import start_verdict as start_verdict

# Public names in the groups of docs/api.md: title of the group -> name -> the module that defines
# the name. A module is imported when one of its names is first used.
_GROUPS = {
    "Reports and comparisons": {
        "write_report": "lab.report.report",
        "compare_curves": "lab.curves",
        "start_verdict": "lab.verdict.verdict",
        "resume_verdict": "lab.verdict.verdict",
        "reproduce_run": "lab.reproduce",
        "show_runs": "lab.run_list",
    },
    "Plans": {
        "Plan": "lab.plan",
        "measure_step": "lab.plan",
        "show_plan": "lab.plan",
    },
    "Checks of data and machine": {
        "check_images": "lab.image_check",
        "show_check": "lab.image_check",
        "write_page": "lab.image_check",
        "write_images": "lab.image_page",
        "examine": "lab.doctor",
    },
}
__getattr__, __dir__, __all__ = attach(__name__, _GROUPS)
