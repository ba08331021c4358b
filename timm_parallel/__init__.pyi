# The app of a project, and its entry point
from timm_parallel.app import App as App
from timm_parallel.entry import main as main

# Configs: base dataclasses, the declaration of a key, and functions that build a config
from timm_parallel.keys import Config as Config
from timm_parallel.keys import ResolvedConfig as ResolvedConfig
from timm_parallel.keys import ModelConfig as ModelConfig
from timm_parallel.keys import DataConfig as DataConfig
from timm_parallel.keys import OptimConfig as OptimConfig
from timm_parallel.keys import TrainConfig as TrainConfig
from timm_parallel.keys import ResolvedTrain as ResolvedTrain
from timm_parallel.keys import ResolvedParallel as ResolvedParallel
from timm_parallel.keys import key as key
from timm_parallel.keys import leaves as leaves
from timm_parallel.keys import is_own_class as is_own_class
from timm_parallel.keys import is_timm_dataset as is_timm_dataset
from timm_parallel.config.validate import option_problems as option_problems
from timm_parallel.config.validate import own_class_problems as own_class_problems
from timm_parallel.checked_configs import compose as compose
from timm_parallel.checked_configs import check_config as check_config
from timm_parallel.config.resolve import resolve as resolve
from timm_parallel.checked_configs import resolve_devices as resolve_devices
from timm_parallel.config.compose import load_config as load_config
from timm_parallel.checked_configs import evaluation_config as evaluation_config

# Tasks
from timm_parallel.task import Task as Task
from timm_parallel.task import find_task as find_task
from timm_parallel.batch import Batch as Batch
from timm_parallel.batch import stretched as stretched
from timm_parallel.metric import Metric as Metric
from timm_parallel.metric import to_double as to_double

# Data
from timm_parallel.data.dataset import ImageDataset as ImageDataset
from timm_parallel.data.csv_listing import csv_groups as csv_groups
from timm_parallel.data.dataset import check_classes as check_classes
from timm_parallel.data.build import check_data as check_data
from timm_parallel.data.build import load_dataset as load_dataset
from timm_parallel.data.file_list import batches_per_epoch as batches_per_epoch
from timm_parallel.data.dataset import InMemory as InMemory
from timm_parallel.data.dataset import in_memory as in_memory
from timm_parallel.data.decode import Files as Files
from timm_parallel.data.dataset import as_size as as_size
from timm_parallel.data.on_device import Erasing as Erasing
from timm_parallel.data.on_device import Mixing as Mixing
from timm_parallel.patches import posterize_to_black as posterize_to_black

# Models
from timm_parallel.model.weights import load_weights as load_weights
from timm_parallel.model.weights import preprocessing_of as preprocessing_of
from timm_parallel.patches import create_model_with_filter as create_model_with_filter
from timm_parallel.model.checks import refuse_failed_download as refuse_failed_download
from timm_parallel.parallel.networks import Networks as Networks
from timm_parallel.parallel.networks import autocast as autocast
from timm_parallel.model.checks import check_networks as check_networks
from timm_parallel.model.flops import measure_step as measure_step
from timm_parallel.model.freeze import freeze as freeze
from timm_parallel.model.freeze import head_names as head_names

# Strategies, which spread a model over devices
from timm_parallel.parallel.strategy import Strategy as Strategy
from timm_parallel.parallel.strategy import Single as Single
from timm_parallel.parallel.distributed import Distributed as Distributed
from timm_parallel.parallel.strategy import build_strategy as build_strategy

# A run
from timm_parallel.run.build import build_eval_loaders as build_eval_loaders
from timm_parallel.run.build import build_parts as build_parts
from timm_parallel.run.run import start_run as start_run
from timm_parallel.run.run import Training as Training
from timm_parallel.run.parts import Learning as Learning
from timm_parallel.run.parts import build_networks as build_networks
from timm_parallel.run.parts import evaluation_networks as evaluation_networks
from timm_parallel.task import Evaluation as Evaluation
from timm_parallel.run.evaluation import evaluate as evaluate
from timm_parallel.record.result import read_result as read_result
from timm_parallel.record.result import read_metrics as read_metrics
from timm_parallel.record.environment import read_environment as read_environment
from timm_parallel.run.checkpoint import read_checkpoint as read_checkpoint
from timm_parallel.run.restoring import load_networks as load_networks
from timm_parallel.trackers.tracker import Tracker as Tracker
from timm_parallel.record.confusion import draw_confusion as draw_confusion
from timm_parallel.run.evaluation import write_predictions as write_predictions

# Errors, names and scripts
from timm_parallel.errors import refuse_wrong_arguments as refuse_wrong_arguments
from timm_parallel.machine.imports import import_class as import_class
from timm_parallel.machine.imports import import_name as import_name
from timm_parallel.config.arguments import command_line as command_line
from timm_parallel.config.arguments import number_argument as number_argument
from timm_parallel.config.arguments import counts_argument as counts_argument
from timm_parallel.config.arguments import file_argument as file_argument
from timm_parallel.config.arguments import errors_in_one_line as errors_in_one_line
from timm_parallel.machine.signals import exit_process as exit_process
from timm_parallel.config.arguments import print_json as print_json
from timm_parallel.launch.torchrun import run_on_devices as run_on_devices
from timm_parallel.machine.files import write_json as write_json
from timm_parallel.machine.files import write_text as write_text
