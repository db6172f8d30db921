/* ckpt.c - checkpoints as a whole: found, loaded, saved, committed, pruned
 *
 * Every part that can fail on one rank ends in agree(): all ranks learn of the failure, with its
 * text, and do the same next. Only rank 0 makes, renames and removes folders. The rename commits;
 * nothing is removed before it. */
#include "worker/ckpt.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/mem.h"
#include "worker/agree.h"
#include "worker/ckpt_beside.h"
#include "worker/ckpt_files.h"
#include "worker/ckpt_state.h"
#include "worker/peft.h"

#define FILE_BYTES_MAX ((uint64_t)4 << 30)

/* ---- folders -------------------------------------------------------------------------------- */

static char *step_folder(const struct ckpt_config *c, uint64_t step)
{
    return xasprintf("%s/step-%" PRIu64, c->path, step);
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path) < 0 && errno != ENOENT ? -1 : 0;
}

static int remove_tree(const char *path)
{
    return nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) < 0 && errno != ENOENT ? -errno : 0;
}

static int make_folders(const char *path, struct err *err)
{
    char *part = xstrdup(path);
    int rc = 0;
    for (char *p = part + 1; rc == 0; p++) {
        if (*p != '/' && *p != '\0')
            continue;
        char was = *p;
        *p = '\0';
        if (mkdir(part, 0777) < 0 && errno != EEXIST)
            rc = err_set(err, -errno, "checkpoint.path %s: %s: %s", path, part, strerror(errno));
        *p = was;
        if (was == '\0')
            break;
    }
    free(part);
    return rc;
}

static int sync_folder(const char *path, struct err *err)
{
    int rc = 0, fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) < 0)
        rc = err_set(err, -errno, "%s: fsync: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return rc;
}

/* The number of "step-N", 0 for any other name. */
static uint64_t step_of(const char *name)
{
    char *end;
    if (strncmp(name, "step-", 5) != 0 || name[5] < '1' || name[5] > '9')
        return 0;
    uint64_t step = strtoull(name + 5, &end, 10);
    return *end == '\0' ? step : 0;
}

static int by_step(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Committed steps, ascending. Gives *out_steps. */
static int list_steps(const char *path, uint64_t **out_steps, size_t *out_n, struct err *err)
{
    DIR *d = opendir(path);
    if (!d)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    uint64_t *steps = NULL, step;
    size_t n = 0;
    for (struct dirent *e; (e = readdir(d));)
        if ((step = step_of(e->d_name)) > 0) {
            steps = xrealloc(steps, (n + 1) * sizeof *steps);
            steps[n++] = step;
        }
    closedir(d);
    if (n > 0)
        qsort(steps, n, sizeof *steps, by_step);
    *out_steps = steps;
    *out_n = n;
    return 0;
}

/* step-N.tmp of a save that was cut, and step-N.old of a prune that was. */
static void remove_torn(const char *path)
{
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        if (strncmp(e->d_name, "step-", 5) != 0 || n < 9 ||
            (strcmp(e->d_name + n - 4, ".tmp") != 0 && strcmp(e->d_name + n - 4, ".old") != 0))
            continue;
        char *full = xasprintf("%s/%s", path, e->d_name);
        if (remove_tree(full) < 0)
            log_warn("path=%s msg=\"cannot remove a half-written checkpoint: %s\"", full,
                     strerror(errno));
        free(full);
    }
    if (d)
        closedir(d);
}

/* So that two runs never write into one folder. */
static int lock_path(const char *path, uint64_t patience_ns, int *out_fd, struct err *err)
{
    uint64_t deadline = clock_now_ns() + patience_ns;
    char *file = xasprintf("%s/.lock", path);
    int rc = 0, fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 && errno == ENOTDIR)
        rc = err_set(err, -ENOTDIR, "checkpoint.path %s is a file; give this job a folder", path);
    else if (fd < 0)
        rc = err_set(err, -errno, "%s: %s", file, strerror(errno));
    while (rc == 0 && flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            break; /* a file system without locks: the job's fencing has to do */
        if (clock_now_ns() >= deadline)
            rc = err_set(err, -EBUSY, "checkpoint.path %s: another run writes there; give this job "
                         "a path of its own or wait for the other's end", path);
        else
            nanosleep(&(struct timespec){.tv_nsec = 50 * NS_PER_MS}, NULL);
    }
    if (rc == 0)
        *out_fd = fd;
    else if (fd >= 0)
        close(fd);
    free(file);
    return rc;
}

static int find_newest(const struct ckpt_config *c, uint64_t patience_ns, int *out_lock,
                       double *out_step, struct err *err)
{
    uint64_t *steps;
    size_t n;
    int rc;
    if ((rc = make_folders(c->path, err)) < 0 ||
        (rc = lock_path(c->path, patience_ns, out_lock, err)) < 0)
        return rc;
    remove_torn(c->path);
    if ((rc = list_steps(c->path, &steps, &n, err)) < 0)
        return rc;
    *out_step = n > 0 ? (double)steps[n - 1] : 0;
    free(steps);
    return 0;
}

int ckpt_find(const struct ckpt_config *c, uint64_t patience_ns, int *out_lock,
              uint64_t *out_step, struct err *err)
{
    double step = 0;
    int lock = -1;
    int rc = c->coll->rank == 0 ? find_newest(c, patience_ns, &lock, &step, err) : 0;
    if ((rc = agree(c->coll, rc, err)) == 0)
        rc = c->coll->ops->all_reduce_f64(c->coll, &c->coll->world_group, COLL_MAX, &step, 1, err);
    if (rc < 0) {
        if (lock >= 0)
            close(lock);
        return rc;
    }
    *out_lock = lock;
    *out_step = (uint64_t)step;
    return 0;
}

/* ---- loading -------------------------------------------------------------------------------- */

/* Where each kind of number lies in a checkpoint. */
static const char *const folders_of[] = {[CKPT_WEIGHTS] = "", [CKPT_ADAPTERS] = "",
                                         [CKPT_M] = "/ballast/m", [CKPT_V] = "/ballast/v",
                                         [CKPT_MASTERS] = "/ballast/masters"};

static bool is_kept(const struct ckpt_config *c, int what)
{
    if (what == CKPT_MASTERS)
        return c->forms && !c->lora && c->forms->n_masters > 0;
    return what != (c->lora ? CKPT_WEIGHTS : CKPT_ADAPTERS);
}

static struct ckpt_tensors tensors_of(const struct ckpt_config *c, enum ckpt_what what)
{
    return (struct ckpt_tensors){.map = c->map, .shard = c->shard, .what = what,
                                 .forms = c->forms,
                                 .file_bytes_max = c->file_bytes_max ? c->file_bytes_max
                                                                     : FILE_BYTES_MAX};
}

int ckpt_load_base(const char *model_path, struct shard *s, const struct tensor_map *map,
                   bool rounds, struct err *err)
{
    struct ckpt_tensors t = {.map = map, .shard = s, .what = CKPT_WEIGHTS, .rounds = rounds};
    return ckpt_files_read(&t, model_path, err);
}

int ckpt_load_weights(const char *model_path, struct shard *s, const struct tensor_map *map,
                      struct err *err)
{
    return ckpt_load_base(model_path, s, map, false, err);
}

int ckpt_load_adapters(const char *path, struct shard *s, const struct tensor_map *map,
                       struct err *err)
{
    struct ckpt_tensors t = {.map = map, .shard = s, .what = CKPT_ADAPTERS};
    return ckpt_files_read(&t, path, err);
}

bool ckpt_has_weights(const char *model_path)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    bool has = false;
    for (size_t i = 0; i < 2 && !has; i++) {
        char *path = xasprintf("%s/%s", model_path, names[i]);
        has = access(path, F_OK) == 0;
        free(path);
    }
    return has;
}

/* That the job has not become one of adapters of another rank or scale. */
static int check_adapter(const struct ckpt_config *c, const char *folder, struct err *err)
{
    struct peft p;
    int rc = peft_open(folder, &p, err);
    if (rc < 0)
        return rc;
    rc = peft_check(&p, folder, c->lora, err);
    peft_fini(&p);
    return rc;
}

/* Masters come last: what they hold replaces what was rounded. */
static int read_all(const struct ckpt_config *c, const char *folder, struct ckpt_state *out,
                    struct err *err)
{
    int rc = ckpt_state_read(c, folder, out, err);
    if (rc == 0 && c->lora)
        rc = check_adapter(c, folder, err);
    for (int what = 0; what < CKPT_WHATS && rc == 0; what++) {
        struct ckpt_tensors t = tensors_of(c, (enum ckpt_what)what);
        if (what == CKPT_MASTERS ? out->n_masters == 0 : !is_kept(c, what))
            continue;
        t.n_masters = out->n_masters;
        char *path = xasprintf("%s%s", folder, folders_of[what]);
        rc = ckpt_files_read(&t, path, err);
        free(path);
    }
    return rc;
}

/* The cause comes first: where paths are long, a reader downstream cuts the end off. */
static void say_what_to_do(const char *folder, struct err *err)
{
    if (!err)
        return;
    struct err cause = *err;
    err_set(err, cause.code, "the newest checkpoint cannot be used: %.500s; if it is damaged, "
            "'mv %s %s.unused' resumes from the one before; another checkpoint.path begins anew",
            cause.text, folder, folder);
}

int ckpt_load(const struct ckpt_config *c, uint64_t step, struct ckpt_state *out_state,
              struct err *err)
{
    char *folder = step_folder(c, step);
    struct ckpt_state state = {0};
    int rc = ckpt_sums_check(folder, c->coll, err);
    if (rc == 0)
        rc = read_all(c, folder, &state, err);
    if (rc == 0 && state.step != step)
        rc = err_set(err, -EINVAL, "%s: state.json is of step %" PRIu64, folder, state.step);
    if (rc < 0)
        say_what_to_do(folder, err);
    free(folder);
    if ((rc = agree(c->coll, rc, err)) < 0)
        return rc;
    *out_state = state;
    return 0;
}

/* ---- saving --------------------------------------------------------------------------------- */

static int create_all(const struct ckpt_config *c, const struct ckpt_carried *carried,
                      const char *tmp, struct err *err)
{
    struct ckpt_tensors t = tensors_of(c, c->lora ? CKPT_ADAPTERS : CKPT_WEIGHTS);
    char *extra = xasprintf("%s/ballast", tmp);
    int rc = remove_tree(tmp);
    if (rc < 0)
        err_set(err, rc, "%s: %s", tmp, strerror(-rc));
    t.is_one_of_many = carried->n > 0;
    if (rc == 0 && (rc = ckpt_files_create(&t, carried, tmp, err)) == 0 && mkdir(extra, 0777) < 0)
        rc = err_set(err, -errno, "%s: %s", extra, strerror(errno));
    for (int what = CKPT_M; what < CKPT_WHATS && rc == 0; what++) {
        struct ckpt_tensors part = tensors_of(c, (enum ckpt_what)what);
        if (!is_kept(c, what))
            continue;
        char *path = xasprintf("%s%s", tmp, folders_of[what]);
        rc = ckpt_files_create(&part, NULL, path, err);
        free(path);
    }
    free(extra);
    if (rc < 0)
        return rc;
    if (c->lora)
        return peft_write_config(tmp, c->lora, c->map, c->model_path, err);
    return ckpt_copy_model_files(c->model_path, c->forms && c->forms->is_packed, tmp, err);
}

static int write_all(const struct ckpt_config *c, bool has_carried, const char *tmp,
                     struct ckpt_sums *sums, struct err *err)
{
    int rc = 0;
    for (int what = 0; what < CKPT_WHATS && rc == 0; what++) {
        struct ckpt_tensors t = tensors_of(c, (enum ckpt_what)what);
        if (!is_kept(c, what))
            continue;
        char *path = xasprintf("%s%s", tmp, folders_of[what]);
        t.is_one_of_many = has_carried && what == CKPT_WEIGHTS;
        t.sums = sums;
        t.place = what == CKPT_ADAPTERS ? "/" PEFT_TENSORS_FILE : folders_of[what];
        rc = ckpt_files_write(&t, path, err);
        free(path);
    }
    return rc;
}

static int commit(const struct ckpt_config *c, const char *tmp, const char *folder,
                  const struct ckpt_state *state, const struct ckpt_sums *sums, struct err *err)
{
    static const char *const outer[] = {"/ballast", ""};
    int rc = ckpt_state_write(c, tmp, state, err);
    if (rc == 0)
        rc = ckpt_sums_write(sums, tmp, err);
    for (int i = CKPT_M; i < CKPT_WHATS + 2 && rc == 0; i++) {
        if (i < CKPT_WHATS && !is_kept(c, i))
            continue;
        char *path = xasprintf("%s%s", tmp, i < CKPT_WHATS ? folders_of[i] : outer[i - CKPT_WHATS]);
        rc = sync_folder(path, err);
        free(path);
    }
    if (rc < 0)
        return rc;
    if (c->before_commit)
        c->before_commit(c->context);
    failpoint("checkpoint-before-rename");
    if (rename(tmp, folder) < 0)
        return err_set(err, -errno, "%s: rename: %s", folder, strerror(errno));
    rc = sync_folder(c->path, err);
    failpoint("checkpoint-after-rename");
    return rc;
}

/* A folder is renamed before it is removed, so that half of one is never taken for a whole. */
static void prune(const struct ckpt_config *c)
{
    uint64_t *steps;
    size_t n;
    if (c->keep == 0 || list_steps(c->path, &steps, &n, NULL) < 0)
        return;
    for (size_t i = 0; i + c->keep < n; i++) {
        char *folder = step_folder(c, steps[i]), *old = xasprintf("%s.old", folder);
        if (rename(folder, old) < 0 || remove_tree(old) < 0)
            log_warn("path=%s msg=\"cannot remove an old checkpoint: %s\"", folder,
                     strerror(errno));
        free(folder);
        free(old);
    }
    free(steps);
}

/* By all ranks, into tmp. */
static int save_into(const struct ckpt_config *c, const struct ckpt_state *state, const char *tmp,
                     const char *folder, struct err *err)
{
    bool is_first = c->coll->rank == 0;
    struct ckpt_carried carried = {0};
    struct ckpt_sums sums = {0};
    bool is_packed = c->forms && c->forms->is_packed;
    int rc = 0;
    if (is_first && !c->lora)
        rc = ckpt_carried_open(c->model_path, c->map, is_packed, &carried, err);
    double has_carried = carried.n > 0;

    if ((rc = agree(c->coll, rc, err)) == 0 &&
        (rc = c->coll->ops->all_reduce_f64(c->coll, &c->coll->world_group, COLL_MAX, &has_carried,
                                           1, err)) == 0 &&
        (rc = agree(c->coll, is_first ? create_all(c, &carried, tmp, err) : 0, err)) == 0 &&
        (rc = agree(c->coll, write_all(c, has_carried > 0, tmp, &sums, err), err)) == 0 &&
        (rc = ckpt_sums_gather(&sums, c->coll, err)) == 0)
        rc = agree(c->coll, is_first ? commit(c, tmp, folder, state, &sums, err) : 0, err);
    ckpt_carried_close(&carried);
    ckpt_sums_fini(&sums);
    return rc;
}

int ckpt_save(const struct ckpt_config *c, const struct ckpt_state *state, struct err *err)
{
    bool is_first = c->coll->rank == 0;
    char *folder = step_folder(c, state->step), *tmp = xasprintf("%s.tmp", folder);
    double exists = is_first && access(folder, F_OK) == 0;
    int rc = c->coll->ops->all_reduce_f64(c->coll, &c->coll->world_group, COLL_MAX, &exists, 1,
                                          err);
    if (rc < 0 || exists > 0)
        goto end;
    rc = save_into(c, state, tmp, folder, err);
    if (is_first && rc == 0)
        prune(c);
    else if (is_first)
        remove_tree(tmp);
end:
    free(folder);
    free(tmp);
    return rc;
}
