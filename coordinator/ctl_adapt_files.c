/* ctl_adapt_files.c - the folder that adapt writes: job, cluster, launch files, reports */
#include "coordinator/ctl_adapt.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/job_spec.h"

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

/* ---- job and cluster ------------------------------------------------------------------------ */

static void write_job(const struct adapt *a, FILE *f)
{
    Ballast__JobSpec *spec = adapt_job(a, adapt_job_plan(a));
    fprintf(f, "# Written by ballast adapt; see REPORT.md. Put tokens (u32) into "
            "data/train.bin, or change data.\n");
    if (!a->runs)
        fprintf(f, "# The engine does not train this model yet; see operators-missing.md.\n");
    else if (!a->today_fits)
        fprintf(f, "# It does not fit this cluster; see REPORT.md.\n");
    fields_print_yaml(&job_spec_table, spec, f);
    adapt_job_free(spec);
}

static void write_cluster(const struct adapt *a, FILE *f)
{
    fprintf(f, "# The machines that the plan is for: ballast adapt MODEL --cluster cluster.yaml\n");
    fields_print_yaml(&cluster_table, &a->cluster, f);
}

/* ---- launch files --------------------------------------------------------------------------- */

static void write_worker_yaml(FILE *f, const char *indent, const char *name, const char *node,
                              const char *address, const char *state, const char *roots,
                              const char *device)
{
    fprintf(f, "%sname: %s\n%snode: %s\n%scoordinator: %s\n%sstate_dir: %s\n"
            "%sallowed_roots: [%s]\n%sdevice: %s\n", indent, name, indent, node, indent, address,
            indent, state, indent, roots, indent, device);
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

static void write_local(const struct adapt *a, FILE *f)
{
    fprintf(f,
        "#!/bin/bash\n"
        "# One coordinator and the workers of this machine, then the job. Ends them when it ends.\n"
        "#   ROOTS   folders that hold model, data and checkpoints, with commas\n"
        "#   DEVICE  cuda or cpu\n"
        "set -euo pipefail\n"
        "here=$(cd \"$(dirname \"$0\")\" && pwd)\n");
    write_roots(a, f);
    fprintf(f,
        "device=${DEVICE:-cuda}\n"
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
        "EOF\n"
        "ballast-coordinator --config \"$run/coordinator.yaml\" >\"$run/coordinator.log\" 2>&1 &\n"
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
        "    ballast-worker --config \"$run/worker-$i.yaml\" >\"$run/worker-$i.log\" 2>&1 &\n"
        "    pids+=($!)\n"
        "done\n\n"
        "echo \"logs are in $run\" >&2\n"
        "ballast submit \"$here/job.yaml\" --follow\n");
}

static void write_slurm(const struct adapt *a, FILE *f)
{
    fprintf(f,
        "#!/bin/bash\n"
        "#SBATCH --job-name=%s\n"
        "#SBATCH --nodes=%" PRIu32 "\n"
        "#SBATCH --ntasks-per-node=%" PRIu32 "\n"
        "#SBATCH --gpus-per-node=%" PRIu32 "\n"
        "#SBATCH --exclusive\n"
        "# A worker for every task; the coordinator beside the first. Between machines daemons\n"
        "# speak only in versions whose addresses may leave a machine; others say so at once.\n"
        "#   ROOTS  folders of all nodes that hold model, data and checkpoints, with commas\n"
        "set -euo pipefail\n"
        "here=$(cd \"${SLURM_SUBMIT_DIR:-.}\" && pwd)\n",
        a->name, job_nodes(a), job_gpus(a), job_gpus(a));
    write_roots(a, f);
    fprintf(f,
        "run=$here/run-$SLURM_JOB_ID\n"
        "mkdir -p \"$run\"\n"
        "address=ipc://$run/coordinator.sock\n"
        "if [ \"${SLURM_JOB_NUM_NODES:-1}\" -gt 1 ]; then\n"
        "    address=tcp://$(hostname -i | cut -d' ' -f1):7070\n"
        "fi\n"
        "export BALLAST_ADDRESS=$address\n\n"
        "cat >\"$run/coordinator.yaml\" <<EOF\n"
        "listen: [$address]\n"
        "state_dir: ${TMPDIR:-/tmp}/ballast-$SLURM_JOB_ID\n"
        "EOF\n"
        "ballast-coordinator --config \"$run/coordinator.yaml\" >\"$run/coordinator.log\" 2>&1 &\n"
        "coordinator=$!\n\n"
        "cat >\"$run/worker\" <<'EOF'\n"
        "#!/bin/bash\n"
        "set -euo pipefail\n"
        "file=$RUN/worker-$SLURM_PROCID.yaml\n"
        "cat >\"$file\" <<YAML\n");
    write_worker_yaml(f, "", "worker-$SLURM_PROCID", "$(hostname)", "$BALLAST_ADDRESS",
                      "${TMPDIR:-/tmp}/ballast-$SLURM_JOB_ID-$SLURM_LOCALID", "$ROOTS",
                      "cuda:$SLURM_LOCALID");
    fprintf(f,
        "YAML\n"
        "exec ballast-worker --config \"$file\"\n"
        "EOF\n"
        "chmod +x \"$run/worker\"\n"
        "RUN=$run ROOTS=$roots srun --kill-on-bad-exit=0 --output=\"$run/worker-%%t.log\" "
        "\"$run/worker\" &\n"
        "workers=$!\n"
        "trap 'kill \"$workers\" \"$coordinator\" 2>/dev/null || true; wait' EXIT\n\n"
        "ballast submit \"$here/job.yaml\" --follow\n");
}

static void write_k8s_coordinator(const struct adapt *a, FILE *f)
{
    fprintf(f,
        "# One coordinator, and a pod for each machine with a worker for each of its GPUs. Set\n"
        "# the image and the claim. Between pods daemons speak only in versions whose addresses\n"
        "# may leave a machine; others say so at once.\n"
        "apiVersion: v1\n"
        "kind: Service\n"
        "metadata: {name: %s-coordinator}\n"
        "spec:\n"
        "  clusterIP: None\n"
        "  selector: {app: %s-coordinator}\n"
        "  ports: [{name: rpc, port: 7070}]\n"
        "---\n"
        "apiVersion: apps/v1\n"
        "kind: StatefulSet\n"
        "metadata: {name: %s-coordinator}\n"
        "spec:\n"
        "  serviceName: %s-coordinator\n"
        "  replicas: 1\n"
        "  selector: {matchLabels: {app: %s-coordinator}}\n"
        "  template:\n"
        "    metadata: {labels: {app: %s-coordinator}}\n"
        "    spec:\n"
        "      containers:\n"
        "        - name: coordinator\n"
        "          image: ballast:latest\n"
        "          command: [/bin/sh, -c]\n"
        "          args:\n"
        "            - |\n"
        "              printf 'listen: [tcp://%%s:7070]\\nstate_dir: /state\\n' \"$POD_IP\" \\\n"
        "                >/tmp/c.yaml\n"
        "              exec ballast-coordinator --config /tmp/c.yaml\n"
        "          env:\n"
        "            - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}\n"
        "          volumeMounts: [{name: state, mountPath: /state}]\n"
        "  volumeClaimTemplates:\n"
        "    - metadata: {name: state}\n"
        "      spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 20Gi}}}\n"
        "---\n",
        a->name, a->name, a->name, a->name, a->name, a->name);
}

static void write_k8s(const struct adapt *a, FILE *f)
{
    write_k8s_coordinator(a, f);
    fprintf(f,
        "apiVersion: apps/v1\n"
        "kind: StatefulSet\n"
        "metadata: {name: %s-worker}\n"
        "spec:\n"
        "  serviceName: %s-worker\n"
        "  replicas: %" PRIu32 "\n"
        "  podManagementPolicy: Parallel\n"
        "  selector: {matchLabels: {app: %s-worker}}\n"
        "  template:\n"
        "    metadata: {labels: {app: %s-worker}}\n"
        "    spec:\n"
        "      containers:\n"
        "        - name: workers\n"
        "          image: ballast:latest\n"
        "          command: [/bin/sh, -c]\n"
        "          args:\n"
        "            - |\n"
        "              for i in $(seq 0 %" PRIu32 "); do\n"
        "                cat >/tmp/worker-$i.yaml <<EOF\n",
        a->name, a->name, job_nodes(a), a->name, a->name, job_gpus(a) - 1);
    write_worker_yaml(f, "              ", "$HOSTNAME-$i", "$HOSTNAME", "$BALLAST_ADDRESS",
                      "/tmp/worker-$i", "/shared", "cuda:$i");
    fprintf(f,
        "              EOF\n"
        "                ballast-worker --config /tmp/worker-$i.yaml &\n"
        "              done\n"
        "              wait\n"
        "          env:\n"
        "            - name: BALLAST_ADDRESS\n"
        "              value: tcp://%s-coordinator-0.%s-coordinator:7070\n"
        "          resources: {limits: {nvidia.com/gpu: %" PRIu32 "}}\n"
        "          volumeMounts:\n"
        "            - {name: shared, mountPath: /shared}\n"
        "            - {name: memory, mountPath: /dev/shm}\n"
        "      volumes:\n"
        "        - {name: shared, persistentVolumeClaim: {claimName: shared}}\n"
        "        - {name: memory, emptyDir: {medium: Memory}}\n",
        a->name, a->name, job_gpus(a));
}

/* ---- the folder ----------------------------------------------------------------------------- */

static int write_file(const struct adapt *a, const char *folder, const char *name,
                      void (*write)(const struct adapt *, FILE *), mode_t mode, struct err *err)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "we");
    int rc = 0;
    if (f)
        write(a, f);
    if (!f || ferror(f) || fchmod(fileno(f), mode) < 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (f && fclose(f) != 0 && rc == 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    free(path);
    return rc;
}

int adapt_files(const struct adapt *a, const char *folder, struct err *err)
{
    static const struct {
        const char *name;
        void (*write)(const struct adapt *, FILE *);
        mode_t mode;
    } files[] = {
        {"job.yaml", write_job, 0644}, {"cluster.yaml", write_cluster, 0644},
        {"launch-local.sh", write_local, 0755}, {"launch-slurm.sbatch", write_slurm, 0755},
        {"launch-k8s.yaml", write_k8s, 0644}, {"operators-missing.md", adapt_missing, 0644},
        {"REPORT.md", adapt_report, 0644},
    };
    int rc = 0;
    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return err_set(err, -errno, "%s: %s", folder, strerror(errno));
    for (size_t i = 0; rc == 0 && i < sizeof files / sizeof *files; i++)
        rc = write_file(a, folder, files[i].name, files[i].write, files[i].mode, err);
    return rc;
}
