# Reports and comparisons
from timm_parallel.lab.report.report import write_report as write_report
from timm_parallel.lab.reproduce import compare_curves as compare_curves
from timm_parallel.lab.verdict.verdict import start_verdict as start_verdict
from timm_parallel.lab.verdict.verdict import resume_verdict as resume_verdict
from timm_parallel.lab.reproduce import reproduce_run as reproduce_run
from timm_parallel.lab.run_list import show_runs as show_runs

# Checks of data and machine
from timm_parallel.lab.image_check import check_images as check_images
from timm_parallel.lab.image_check import show_check as show_check
from timm_parallel.lab.image_check import write_page as write_page
from timm_parallel.lab.image_page import write_images as write_images
from timm_parallel.lab.doctor import examine as examine
