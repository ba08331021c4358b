#!/usr/bin/env bash
# A real Slurm cluster of two nodes, n1 and n2, on this one machine, to try jobs on before they go to a large one.
#   tests/template/dev_cluster.sh start     needs root and Debian's slurm-wlm and munge (apt install slurm-wlm)
#   export SLURM_CONF=/tmp/dev_cluster/slurm.conf
#   tests/template/dev_cluster.sh status
#   tests/template/dev_cluster.sh stop
# DEV_CLUSTER=<folder> puts it elsewhere than /tmp/dev_cluster, DEV_CLUSTER_PORT=<number> at that port and the next two.
# Two slurmd, so everything a job sees of two nodes is real
# but the machine below them: they share its cores, disks and loopback.
set -Eeuo pipefail

folder=${DEV_CLUSTER:-/tmp/dev_cluster}
port=${DEV_CLUSTER_PORT:-17000}
export SLURM_CONF=$folder/slurm.conf

configure() {
    mkdir -p "$folder"/{state,n1,n2,munge}
    chmod 755 "$folder" "$folder/munge" # munged wants a way to its socket that everybody may go and nobody may change
    cat >"$SLURM_CONF" <<CONF
ClusterName=dev
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
AuthType=auth/munge
# A requeued job may start again when its old credential has run out: 120 s by default.
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
SlurmdTimeout=30
MinJobAge=600
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=8 RealMemory=8000
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=8 RealMemory=8000
PartitionName=dev Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
}

is_running() { # is_running <pid file>
    [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null
}

start() {
    for program in munged slurmctld slurmd sbatch; do
        command -v $program >/dev/null || { echo "dev_cluster: no $program here; apt install slurm-wlm munge" >&2; exit 2; }
    done
    [ "$(id -u)" = 0 ] || { echo "dev_cluster: the daemons start jobs as other users, so run this as root" >&2; exit 2; }
    if is_running "$folder/slurmctld.pid"; then
        echo "dev_cluster: runs already in $folder" >&2
        exit 2
    fi
    configure
    trap 'tail -n 3 "$folder"/*.log >&2; stop' ERR # nothing half started stays
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
    munged --force --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" --num-threads=2
    slurmctld -c -f "$SLURM_CONF"
    slurmd -N n1 -f "$SLURM_CONF"
    slurmd -N n2 -f "$SLURM_CONF"
    for _ in $(seq 100); do
        [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ] && break
        sleep 0.2
    done
    status
    echo "export SLURM_CONF=$SLURM_CONF"
}

status() {
    is_running "$folder/slurmctld.pid" || { echo "dev_cluster: not running"; exit 1; }
    sinfo --Node --long
    squeue
}

stop() { # the daemons end by their pid files; what they run ends with its job
    if is_running "$folder/slurmctld.pid"; then
        scancel --user=root --quiet || true
        for _ in $(seq 60); do
            [ -z "$(squeue --noheader 2>/dev/null)" ] && break
            sleep 0.5
        done
    fi
    for name in n1 n2 slurmctld munged; do
        is_running "$folder/$name.pid" || continue
        pid=$(cat "$folder/$name.pid")
        kill "$pid"
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
    done
    rm -rf "$folder"
}

case ${1:-} in
    start | status | stop) "$1" ;;
    *)
        echo "usage: $0 start|status|stop" >&2
        exit 2
        ;;
esac
