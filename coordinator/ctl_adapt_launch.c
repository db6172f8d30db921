/* ctl_adapt_launch.c - files that start coordinator, workers and job: here, over ssh, by Slurm, by
 * Kubernetes
 *
 * On one machine daemons meet at a socket. Between machines they need keys: a batch job and a run
 * over ssh make their own, a Kubernetes cluster has them as a secret. */
#include "coordinator/ctl_adapt.h"

#include <ctype.h>
#include <inttypes.h>

#include "coordinator/launch/launch.h"

#define LABEL_BYTES 40 /* objects of Kubernetes add theirs to it, up to 63 in all */

static uint32_t job_nodes(const struct adapt *a)
{
    uint32_t world = adapt_job_plan(a)->choice.world, per = a->cluster.gpus_per_node;
    return (world + per - 1) / per;
}

static uint32_t job_gpus(const struct adapt *a)
{
    uint32_t world = adapt_job_plan(a)->choice.world, per = a->cluster.gpus_per_node;
    return world < per ? world : per;
}

static void write_worker_yaml(FILE *f, const char *indent, const char *name, const char *node,
                              const char *address, const char *state, const char *roots,
                              const char *device)
{
    fprintf(f, "%sname: %s\n%snode: %s\n%scoordinator: %s\n%sstate_dir: %s\n"
            "%sallowed_roots: [%s]\n%sdevice: %s\n", indent, name, indent, node, indent, address,
            indent, state, indent, roots, indent, device);
}

static const char *device_kind(const struct adapt *a)
{
    return cluster_is_cpu(&a->cluster) ? "cpu" : "cuda";
}

/* What Kubernetes takes as the name of a service: small letters, digits and '-', first a letter. */
static void label_of(const char *name, char out[LABEL_BYTES])
{
    size_t n = 0;
    if (!isalpha((unsigned char)*name))
        out[n++] = 'm';
    for (; *name && n < LABEL_BYTES - 1; name++) {
        bool is_plain = isalnum((unsigned char)*name);
        if (is_plain || (n && out[n - 1] != '-'))
            out[n++] = is_plain ? (char)tolower((unsigned char)*name) : '-';
    }
    while (out[n - 1] == '-')
        n--;
    out[n] = '\0';
}

/* Without it what is missing would be said in the log of a daemon alone. */
static void write_programs(FILE *f)
{
    fputs("for program in ballast ballast-coordinator ballast-worker; do\n"
          "    command -v $program >/dev/null || { echo \"$0: $program is not on PATH\" >&2; "
          "exit 1; }\n"
          "done\n", f);
}

/* As one word of a shell. */
static void write_word(FILE *f, const char *text)
{
    fputc('\'', f);
    for (; *text; text++)
        fputs(*text == '\'' ? "'\\''" : (char[]){*text, '\0'}, f);
    fputc('\'', f);
}

/* The folders that workers may read and write, as a list of YAML. */
static void write_roots(const struct adapt *a, FILE *f)
{
    Ballast__JobSpec *spec = adapt_job(a, adapt_job_plan(a));
    fputs("model=", f);
    write_word(f, spec->model_path);
    fputs("\nroots=${ROOTS:-\"\\\"$here\\\", \\\"$model\\\"\"}\n", f);
    adapt_job_free(spec);
}

/* What the texts of launch/ want to know: see launch.h. */
static void write_settings(const struct adapt *a, FILE *f)
{
    write_programs(f);
    write_roots(a, f);
    fprintf(f, "device=${DEVICE:-%s}\n", device_kind(a));
}

void adapt_launch_local(const struct adapt *a, FILE *f)
{
    fprintf(f,
        "#!/bin/bash\n"
        "# One coordinator and the workers of this machine, then the job. Ends them when it ends.\n"
        "#   ROOTS   folders that hold model, data and checkpoints, with commas\n"
        "#   DEVICE  cuda or cpu (%s)\n"
        "set -euo pipefail\n"
        "here=$(cd \"$(dirname \"$0\")\" && pwd)\n", device_kind(a));
    write_settings(a, f);
    fputs(launch_keep, f);
    fprintf(f,
        "\ntell() { echo \"$*\" >&2; }\n"
        "n_workers=%" PRIu32 "\n"
        "room=$(($(nproc) * 4)) # on processors several workers may take turns\n"
        "[ \"$device\" = cpu ] || room=$(nvidia-smi -L 2>/dev/null | wc -l || true)\n"
        "if [ \"$n_workers\" -gt \"$room\" ]; then\n"
        "    echo \"$0: the job has $n_workers workers, room for $room is on $device:\" \\\n"
        "        \"adapt with --cluster for it, or use the other launch files\" >&2\n"
        "    exit 1\n"
        "fi\n"
        "run=$(mktemp -d /tmp/ballast-local.XXXXXX)\n"
        "export BALLAST_ADDRESS=ipc://$run/coordinator.sock\n"
        "pids=()\n"
        "stop() { kill \"${pids[@]}\" 2>/dev/null || true; wait; }\n"
        "trap stop EXIT\n\n"
        "cat >\"$run/coordinator.yaml\" <<EOF\n"
        "listen: [$BALLAST_ADDRESS]\n"
        "state_dir: $run/coordinator\n"
        "http: {listen: \"127.0.0.1:0\"}\n"
        "EOF\n"
        "keep coordinator ballast-coordinator --config \"$run/coordinator.yaml\" \\\n"
        "    >\"$run/coordinator.log\" 2>&1 &\n"
        "pids+=($!)\n\n"
        "for i in $(seq 0 $((n_workers - 1))); do\n"
        "    on=$device\n"
        "    [ \"$device\" = cpu ] || on=$device:$i\n"
        "    cat >\"$run/worker-$i.yaml\" <<EOF\n",
        adapt_job_plan(a)->choice.world);
    write_worker_yaml(f, "", "worker-$i", "$(hostname)", "$BALLAST_ADDRESS", "$run/worker-$i",
                      "$roots", "$on");
    fprintf(f,
        "EOF\n"
        "    keep \"worker-$i\" ballast-worker --config \"$run/worker-$i.yaml\" \\\n"
        "        >\"$run/worker-$i.log\" 2>&1 &\n"
        "    pids+=($!)\n"
        "done\n\n"
        "echo \"logs are in $run\" >&2\n"
        "ballast doctor 2>/dev/null | grep '^dashboard' >&2 || true\n"
        "ballast submit \"$here/job.yaml\" --follow\n");
}

void adapt_launch_slurm(const struct adapt *a, FILE *f)
{
    fprintf(f,
        "#!/bin/bash\n"
        "#SBATCH --job-name=%s\n"
        "#SBATCH --nodes=%" PRIu32 "\n"
        "#SBATCH --ntasks-per-node=%" PRIu32 "\n"
        "#SBATCH --exclusive\n", a->name, job_nodes(a), job_gpus(a));
    if (!cluster_is_cpu(&a->cluster))
        fprintf(f, "#SBATCH --gpus-per-node=%" PRIu32 "\n", job_gpus(a));
    fprintf(f,
        "#SBATCH --signal=TERM@120\n"
        "# Two minutes before its time is over workers write a checkpoint and end; the same\n"
        "# sbatch again goes on from there. Add --time, --partition and --account as your site\n"
        "# wants.\n"
        "# A worker for every task; the coordinator beside the first. Over several machines the\n"
        "# batch job makes keys of its own. A daemon that ends by itself is started again, five\n"
        "# times; then the batch job ends.\n"
        "#   ROOTS   folders of all nodes that hold model, data and checkpoints, with commas\n"
        "#   DEVICE  cuda or cpu (%s)\n"
        "#   PORT    of the coordinator, over several machines (7070)\n"
        "set -euo pipefail\n"
        "here=$(cd \"${SLURM_SUBMIT_DIR:-.}\" && pwd)\n"
        "[ -e \"$here/job.yaml\" ] || { echo \"$0: call sbatch in the folder of job.yaml, not in "
        "$here\" >&2; exit 1; }\n", device_kind(a));
    write_settings(a, f);
    fputs(launch_keep, f);
    fputs(launch_slurm, f);
}

void adapt_launch_ssh(const struct adapt *a, FILE *f)
{
    fprintf(f,
        "#!/bin/bash\n"
        "# launch-ssh.sh [HOSTS]   a coordinator here, a worker for each GPU of hosts, then the job;\n"
        "#                         all of it ends with the job, with Ctrl-C, and with stop\n"
        "# launch-ssh.sh status    what workers and job do, from another shell\n"
        "# launch-ssh.sh stop      ends it from there; where none runs, what is left on hosts\n"
        "#\n"
        "# HOSTS is a file (hosts, beside this script) with a host a line, as ssh takes it, and\n"
        "# what is not as usual; the rest of a line after # is nothing:\n"
        "#   node1\n"
        "#   me@node2  gpus=4  address=10.0.0.2   # without: gpus=%" PRIu32 ", what ssh uses\n"
        "# ssh must need no password, and this folder and the model must be on all hosts.\n"
        "#   ROOTS      folders of all hosts that hold model, data and checkpoints, with commas\n"
        "#   DEVICE     cuda or cpu (%s)\n"
        "#   PROGRAMS   folder of the programs on hosts (the same as here, else their PATH)\n"
        "#   PORT       of the coordinator (7070); must be open from the hosts to here\n"
        "#   ADDRESS    of this machine for the hosts (as they see its ssh)\n"
        "#   DATA_PORT  of a host's first worker (any port); each takes two, for other hosts\n"
        "#   SSH        the command with its options (ssh)\n"
        "set -euo pipefail\n"
        "here=$(cd \"$(dirname \"$0\")\" && pwd)\n", job_gpus(a), device_kind(a));
    write_settings(a, f);
    fprintf(f, "n_workers=%" PRIu32 "\nn_gpus=%" PRIu32 " # of a host\n",
            adapt_job_plan(a)->choice.world, job_gpus(a));
    fputs(launch_keep, f);
    fputs(launch_ssh, f);
}

static void write_k8s_service(const char *label, FILE *f)
{
    fprintf(f,
        "apiVersion: v1\n"
        "kind: Service\n"
        "metadata: {name: %s}\n"
        "spec:\n"
        "  clusterIP: None\n"
        "  selector: {app: %s}\n"
        "  ports: [{name: rpc, port: 7070}]\n"
        "---\n", label, label);
}

static void write_k8s_head(const struct adapt *a, const char *label, FILE *f)
{
    fprintf(f,
        "# One coordinator, and a pod for each machine with a worker for each of its %s. Set\n"
        "# the image (deploy/Dockerfile makes one), and the claim (ReadWriteMany), which every\n"
        "# pod has at /shared: model and data lie there. Daemons are user and group 2000, who must\n"
        "# be able to write there. First, once, keys:\n"
        "#   mkdir -m 700 keys\n"
        "#   ballast keygen coordinator --role coordinator --out keys\n"
        "#   ballast keygen workers --role worker --out keys\n"
        "#   ballast keygen me --role admin --out keys\n"
        "#   cat keys/workers.pub keys/me.pub > keys/authorized\n"
        "#   kubectl create secret generic %s-keys --from-file=keys\n"
        "# and then, with the model's place and with data in /shared/data:\n"
        "#   kubectl apply -f launch-k8s.yaml\n"
        "#   kubectl cp job.yaml %s-coordinator-0:/shared/job.yaml\n"
        "#   kubectl exec -it %s-coordinator-0 -- \\\n"
        "#     ballast submit /shared/job.yaml --set model.path=/shared/%s --follow\n"
        "# or from here, where the same claim is at /shared, through a port:\n"
        "#   kubectl port-forward service/%s-coordinator 7070 &\n"
        "#   ballast submit /shared/job.yaml --set model.path=/shared/%s --follow \\\n"
        "#     --address tcp://127.0.0.1:7070 --key keys/me.key \\\n"
        "#     --coordinator-key keys/coordinator.pub\n"
        "# The dashboard, at http://localhost:9477 here:\n"
        "#   kubectl port-forward %s-coordinator-0 9477\n",
        cluster_is_cpu(&a->cluster) ? "ranks" : "GPUs", label, label, label, a->name, label,
        a->name, label);
}

static void write_k8s_set(const char *label, uint32_t n_pods, FILE *f)
{
    fprintf(f,
        "apiVersion: apps/v1\n"
        "kind: StatefulSet\n"
        "metadata: {name: %s}\n"
        "spec:\n"
        "  serviceName: %s\n"
        "  replicas: %" PRIu32 "\n"
        "  podManagementPolicy: Parallel\n"
        "  selector: {matchLabels: {app: %s}}\n"
        "  template:\n"
        "    metadata: {labels: {app: %s}}\n"
        "    spec:\n"
        "      securityContext: {runAsUser: 2000, runAsGroup: 2000, fsGroup: 2000}\n",
        label, label, n_pods, label, label);
}

/* Kubernetes lets the group read secrets, and programs refuse such keys. */
static void write_k8s_own_keys(FILE *f)
{
    fputs("              (umask 077; mkdir -p /tmp/keys; cp /keys/* /tmp/keys/)\n", f);
}

/* Mode 256 is 0400, which YAML 1.2 would read as four hundred. */
static void write_k8s_keys(const char *label, const char *items, FILE *f)
{
    fprintf(f,
        "      volumes:\n"
        "        - {name: shared, persistentVolumeClaim: {claimName: shared}}\n"
        "        - name: keys\n"
        "          secret:\n"
        "            secretName: %s-keys\n"
        "            defaultMode: 256 # 0400\n"
        "            items:\n%s", label, items);
}

static void write_k8s_coordinator(const char *label, FILE *f)
{
    char own[LABEL_BYTES + 16];
    snprintf(own, sizeof own, "%s-coordinator", label);
    write_k8s_service(own, f);
    write_k8s_set(own, 1, f);
    fputs(
        "      containers:\n"
        "        - name: coordinator\n"
        "          image: ballast:latest\n"
        "          command: [/bin/sh, -c]\n"
        "          args:\n"
        "            - |\n", f);
    write_k8s_own_keys(f);
    fputs(
        "              cat >/tmp/c.yaml <<EOF\n"
        "              listen: [tcp://0.0.0.0:7070]\n"
        "              state_dir: /state\n"
        "              key: /tmp/keys/coordinator.key\n"
        "              authorized_keys: /tmp/keys/authorized\n"
        "              http: {listen: \"127.0.0.1:9477\"}\n"
        "              EOF\n"
        "              exec ballast-coordinator --config /tmp/c.yaml\n"
        "          readinessProbe: {exec: {command: [ballast, ping]}, timeoutSeconds: 5}\n"
        "          env: # for a client in this pod\n"
        "            - {name: BALLAST_ADDRESS, value: \"tcp://127.0.0.1:7070\"}\n"
        "            - {name: BALLAST_KEY, value: /tmp/keys/me.key}\n"
        "            - {name: BALLAST_COORDINATOR_KEY, value: /tmp/keys/coordinator.pub}\n"
        "          volumeMounts:\n"
        "            - {name: state, mountPath: /state}\n"
        "            - {name: shared, mountPath: /shared}\n"
        "            - {name: keys, mountPath: /keys, readOnly: true}\n", f);
    write_k8s_keys(label,
        "              - {key: coordinator.key, path: coordinator.key}\n"
        "              - {key: coordinator.pub, path: coordinator.pub}\n"
        "              - {key: authorized, path: authorized}\n"
        "              - {key: me.key, path: me.key}\n", f);
    fputs("  volumeClaimTemplates:\n"
          "    - metadata: {name: state}\n"
          "      spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 20Gi}}}\n"
          "---\n", f);
}

/* The shell is process 1 of the pod: it passes on the signal with which the pod ends, so that
 * trainers write a checkpoint, and starts a worker again that ended by itself. */
static void write_k8s_script(const struct adapt *a, FILE *f)
{
    write_k8s_own_keys(f);
    fprintf(f,
        "              keep() {\n"
        "                trap 'kill $pid; wait $pid; exit' TERM\n"
        "                while :; do\n"
        "                  ballast-worker --config /tmp/worker-$1.yaml & pid=$!\n"
        "                  wait $pid\n"
        "                  sleep 2\n"
        "                done\n"
        "              }\n"
        "              keepers=\n"
        "              for i in $(seq 0 %" PRIu32 "); do\n"
        "                cat >/tmp/worker-$i.yaml <<EOF\n", job_gpus(a) - 1);
    write_worker_yaml(f, "              ", "$HOSTNAME-$i", "$HOSTNAME", "$BALLAST_ADDRESS",
                      "/tmp/worker-$i", "/shared",
                      cluster_is_cpu(&a->cluster) ? "cpu" : "cuda:$i");
    fputs(
        "              key: /tmp/keys/workers.key\n"
        "              coordinator_key: /tmp/keys/coordinator.pub\n"
        "              data_address: \"tcp://$POD_IP:*\"\n"
        "              EOF\n"
        "                keep $i & keepers=\"$keepers $!\"\n"
        "              done\n"
        "              trap 'kill $keepers; wait; exit' TERM\n"
        "              wait\n", f);
}

void adapt_launch_k8s(const struct adapt *a, FILE *f)
{
    char label[LABEL_BYTES], own[LABEL_BYTES + 16];
    label_of(a->name, label);
    snprintf(own, sizeof own, "%s-worker", label);
    write_k8s_head(a, label, f);
    write_k8s_coordinator(label, f);
    write_k8s_service(own, f);
    write_k8s_set(own, job_nodes(a), f);
    fputs(
        "      terminationGracePeriodSeconds: 120 # for a checkpoint\n"
        "      containers:\n"
        "        - name: workers\n"
        "          image: ballast:latest\n"
        "          command: [/bin/sh, -c]\n"
        "          args:\n"
        "            - |\n", f);
    write_k8s_script(a, f);
    fprintf(f,
        "          env:\n"
        "            - name: BALLAST_ADDRESS\n"
        "              value: tcp://%s-coordinator-0.%s-coordinator:7070\n"
        "            - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}\n",
        label, label);
    if (!cluster_is_cpu(&a->cluster))
        fprintf(f, "          resources: {limits: {nvidia.com/gpu: %" PRIu32 "}}\n", job_gpus(a));
    fputs(
        "          volumeMounts:\n"
        "            - {name: shared, mountPath: /shared}\n"
        "            - {name: memory, mountPath: /dev/shm}\n"
        "            - {name: keys, mountPath: /keys, readOnly: true}\n", f);
    write_k8s_keys(label,
        "              - {key: workers.key, path: workers.key}\n"
        "              - {key: coordinator.pub, path: coordinator.pub}\n", f);
    fputs("        - {name: memory, emptyDir: {medium: Memory}}\n", f);
}
