
tell() { echo "$*" >&2; }
run=$here/run-$SLURM_JOB_ID
mkdir -p "$run"
state=${TMPDIR:-/tmp}/ballast-$SLURM_JOB_ID # of this machine's disk
rm -rf "$state" # a job that is queued again goes on from its checkpoint, once
address=ipc://$state.sock
listen=$address
keys=
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    address=tcp://$(hostname):${PORT:-7070}
    listen=tcp://0.0.0.0:${PORT:-7070}
    rm -rf "$run/keys"
    mkdir -m 700 "$run/keys"
    for key in coordinator:coordinator workers:worker me:admin; do
        ballast keygen "${key%:*}" --role "${key#*:}" --out "$run/keys" --quiet >/dev/null
    done
    (umask 077 && cat "$run/keys/workers.pub" "$run/keys/me.pub" >"$run/keys/authorized")
    keys="key: '$run/keys/coordinator.key'
authorized_keys: '$run/keys/authorized'"
    export BALLAST_KEY=$run/keys/me.key
    export BALLAST_COORDINATOR_KEY=$run/keys/coordinator.pub
fi
export BALLAST_ADDRESS=$address

cat >"$run/coordinator.yaml" <<EOF
listen: [$listen]
state_dir: $state
$keys
EOF
keep coordinator ballast-coordinator --config "$run/coordinator.yaml" \
    >"$run/coordinator.log" 2>&1 &
coordinator=$!

{
    echo '#!/bin/bash'
    declare -f tell keep
    cat <<'EOF'
set -euo pipefail
file=$RUN/worker-$SLURM_PROCID.yaml
device=$DEVICE
[ "$device" = cpu ] || device=$device:$SLURM_LOCALID
keys=
if [ -n "${BALLAST_KEY:-}" ]; then # on several machines
    keys="key: '$RUN/keys/workers.key'
coordinator_key: '$RUN/keys/coordinator.pub'
data_address: 'tcp://$(hostname -I | cut -d' ' -f1):*'"
fi
cat >"$file" <<YAML
name: worker-$SLURM_PROCID
node: $(hostname)
coordinator: $BALLAST_ADDRESS
state_dir: ${TMPDIR:-/tmp}/ballast-$SLURM_JOB_ID-$SLURM_PROCID
allowed_roots: [$ROOTS]
device: $device
$keys
YAML
keep "worker-$SLURM_PROCID on $(hostname)" ballast-worker --config "$file"
EOF
} >"$run/worker"
chmod +x "$run/worker"
RUN=$run ROOTS=$roots DEVICE=$device srun --kill-on-bad-exit=1 --cpu-bind=none \
    --output="$run/worker-%t.log" "$run/worker" &
workers=$!
ballast submit "$here/job.yaml" --follow &
job=$!
trap 'kill "$job" "$workers" "$coordinator" 2>/dev/null || true; wait' EXIT

code=0
wait -n "$workers" "$job" || code=$?
if kill -0 "$job" 2>/dev/null; then
    grep -h 'is not started again' "$run"/worker-*.log >&2 || true
    echo "$0: workers have ended before the job; the next run goes on from its checkpoint" >&2
    exit 1
fi
exit "$code"
