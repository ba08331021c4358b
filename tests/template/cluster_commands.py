"""Example commands of docs/slurm.md. Tests run the same commands that the page shows."""

from __future__ import annotations

ONE_NODE = (
    "python train.py cluster=slurm cluster.gpus=2 cluster.cpus=24 cluster.time=4:00:00 "
    "experiment=finetune data.root=/scratch/flowers"
)
LARGE_JOB = (
    "python train.py cluster=slurm cluster.nodes=4 cluster.gpus=8 cluster.cpus=96 "
    "cluster.time=1-00:00:00 parallel=ddp model.name=resnet50 data=folder "
    "data.root=/scratch/imagenet data.batch_size=2048"
)
JOB_WITH_GPUS = (
    "python train.py cluster=slurm cluster.nodes=2 cluster.gpus=4 cluster.cpus=32 "
    "cluster.time=12:00:00 parallel=ddp"
)
JOB = "python train.py cluster=slurm cluster.nodes=2 parallel=ddp"
ARRAY = "python train.py -m cluster=slurm cluster.cpus=4 parallel=single seed=1,2,3,4 sweep.jobs=2"
SEARCH = (
    "python train.py -m search=optuna cluster=slurm cluster.cpus=2 parallel=single "
    "search.n_trials=6 search.n_jobs=2"
)
SRUN = "srun --nodes=2 --ntasks=2 python train.py parallel=ddp"
TORCHRUN = (
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.77.0.1 --master-port "
    "29511 train.py parallel=ddp"
)
CLUSTER_START = "tests/template/dev_cluster.sh start"
CLUSTER_STATUS = "tests/template/dev_cluster.sh status"
CLUSTER_STOP = "tests/template/dev_cluster.sh stop"
KUBERNETES = (
    "python train.py cluster=kubernetes cluster.image=me/train:1 cluster.claim=outputs "
    "cluster.nodes=2 parallel=ddp"
)
