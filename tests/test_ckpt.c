/* test_ckpt.c - checkpoints move between layouts, commit as a whole, and say what is wrong */
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/folder.h"
#include "tests/ranks.h"

#include "common/safetensors.h"
#include "worker/ckpt.h"

static char model_folder[64], path[64];

struct job {
    uint64_t step;
    uint32_t keep;
    uint64_t file_bytes_max;
    const char *expect; /* of the error; NULL: none is expected */
};

static struct ckpt_config config_of(struct test_rank *r)
{
    struct job *job = r->user;
    return (struct ckpt_config){.path = path, .model_path = model_folder, .keep = job->keep,
                                .spec = r->spec, .map = r->map, .shard = r->shard, .coll = r->coll,
                                .file_bytes_max = job->file_bytes_max};
}

static float value(const struct tensor_entry *e, uint64_t i, uint64_t step, uint32_t which)
{
    return (float)(e->offset % 1000) + (float)(i % 777) * 0.25f + (float)step * 8 +
           (float)(e->expert + 1) * 0.125f + (float)which * 1000;
}

static void set_all(struct test_rank *r, uint64_t step, float scale)
{
    for (size_t t = 0; t < r->map->n_entries; t++) {
        const struct tensor_entry *e = &r->map->entries[t];
        struct shard_part p;
        if (!shard_part(r->shard, e, &p))
            continue;
        for (uint64_t i = 0; i < p.count; i++) {
            p.weights[i] = scale * value(e, p.first + i, step, 0);
            if (p.m)
                p.m[i] = scale * value(e, p.first + i, step, 1);
            if (p.v)
                p.v[i] = scale * value(e, p.first + i, step, 2);
        }
    }
}

static void check_all(struct test_rank *r, uint64_t step)
{
    for (size_t t = 0; t < r->map->n_entries; t++) {
        const struct tensor_entry *e = &r->map->entries[t];
        struct shard_part p;
        if (!shard_part(r->shard, e, &p))
            continue;
        for (uint64_t i = 0; i < p.count; i++) {
            RANK_CHECK(r, p.weights[i] == value(e, p.first + i, step, 0));
            RANK_CHECK(r, !p.m == !tensor_is_trained(e) && !p.v == !tensor_has_v(r->map, e));
            RANK_CHECK(r, !p.m || p.m[i] == value(e, p.first + i, step, 1));
            RANK_CHECK(r, !p.v || p.v[i] == value(e, p.first + i, step, 2));
        }
    }
}

static void check_result(struct test_rank *r, int rc)
{
    struct job *job = r->user;
    if (!job->expect) {
        RANK_CHECK(r, rc == 0);
        return;
    }
    RANK_CHECK(r, rc < 0);
    RANK_CHECK(r, strstr(r->err.text, job->expect));
}

static void save(struct test_rank *r)
{
    struct job *job = r->user;
    struct ckpt_config c = config_of(r);
    struct ckpt_state s = {.step = job->step, .seed = 5, .next_sample = job->step * 32,
                           .validation_loss = job->step % 2 ? NAN : 2.5};
    uint64_t newest;
    int lock = -1;
    set_all(r, job->step, 1);
    RANK_CHECK(r, ckpt_find(&c, NS_PER_S, &lock, &newest, &r->err) == 0);
    check_result(r, ckpt_save(&c, &s, &r->err));
    if (lock >= 0)
        close(lock);
}

static void load(struct test_rank *r)
{
    struct job *job = r->user;
    struct ckpt_config c = config_of(r);
    struct ckpt_state s = {0};
    uint64_t newest = 99;
    int lock = -1;
    set_all(r, 3, -1);
    RANK_CHECK(r, ckpt_find(&c, NS_PER_S, &lock, &newest, &r->err) == 0);
    RANK_CHECK(r, newest == job->step);
    if (newest > 0)
        check_result(r, ckpt_load(&c, newest, &s, &r->err));
    if (newest > 0 && !job->expect) {
        RANK_CHECK(r, s.step == job->step && s.seed == 5 && s.next_sample == job->step * 32);
        RANK_CHECK(r, job->step % 2 ? isnan(s.validation_loss) : s.validation_loss == 2.5);
        check_all(r, job->step);
    }
    if (lock >= 0)
        close(lock);
}

static struct model_spec spec;
static struct tensor_map map;

static void run(struct layout_degrees d, void (*body)(struct test_rank *), struct job job)
{
    test_ranks_run(d, &spec, &map, body, &job);
}

static bool exists(const char *name)
{
    char full[200];
    snprintf(full, sizeof full, "%s/%s", path, name);
    return access(full, F_OK) == 0;
}

static int empty_path(void **state)
{
    (void)state;
    unsetenv("BALLAST_FAILPOINT");
    remove_tree(path);
    return 0;
}

static void a_run_resumes_on_any_layout(void **state)
{
    (void)state;
    uint64_t step = 0;
    for (size_t i = 0; i < N_TEST_LAYOUTS; i++) {
        struct layout_degrees other = test_layouts[(i * 7 + 3) % N_TEST_LAYOUTS];
        run(test_layouts[i], save, (struct job){.step = ++step, .keep = 2});
        run(other, load, (struct job){.step = step});
    }
    assert_true(exists("step-23") && exists("step-22") && !exists("step-21"));
    assert_true(exists("step-23/config.json"));
}

/* Muon has no use for them: they take no memory, and checkpoints that have them are read. */
static void second_moments_are_kept_where_they_are_used(void **state)
{
    (void)state;
    struct layout_degrees two = {4, 2, 2, 2}, four = {4, 4, 4, 0};
    run(two, save, (struct job){.step = 1});
    map.has_muon = true;
    run(four, load, (struct job){.step = 1});
    run(four, save, (struct job){.step = 2});
    run(two, load, (struct job){.step = 2});
    map.has_muon = false;
    run(two, load, (struct job){.step = 2, .expect = "train.optimizer.name: muon, which has no "
                                                     "second moments of matrices"});
}

static void many_files_read_as_one(void **state)
{
    (void)state;
    run((struct layout_degrees){4, 2, 2, 0}, save, (struct job){.step = 8,
                                                                .file_bytes_max = 20000});
    assert_true(exists("step-8/model.safetensors.index.json"));
    assert_true(exists("step-8/ballast/m/model.safetensors.index.json"));
    assert_false(exists("step-8/model.safetensors"));
    run((struct layout_degrees){2, 1, 2, 0}, load, (struct job){.step = 8});
}

static void other_tools_find_published_names_and_padding(void **state)
{
    (void)state;
    struct safetensors *st = NULL;
    struct err err = {0};
    char full[200];
    run((struct layout_degrees){2, 2, 1, 0}, save, (struct job){.step = 4});
    snprintf(full, sizeof full, "%s/step-4", path);
    assert_int_equal(safetensors_open(full, &st, &err), 0);
    assert_int_equal(safetensors_count(st), map.n_entries);
    const struct st_view *v =
        safetensors_find(st, "language_model.model.layers.0.self_attn.A_log");
    float a_log[128];
    assert_int_equal(v->n_elements, 128);
    assert_int_equal(st_read_f32(v, 0, 128, a_log, &err), 0);
    assert_true(a_log[1] != 0 && a_log[2] == 0 && a_log[127] == 0);
    safetensors_close(st);
}

/* A vision tower in bytes that no float would keep. */
static const uint16_t tower[6] = {0x7fc1, 0xffff, 0, 1, 0x8000, 0x3f80};

static void write_tower(void)
{
    static const struct st_tensor t = {.name = "vision_tower.patch.weight", .dtype = ST_BF16,
                                       .n_dims = 2, .dims = {2, 3}};
    char full[200];
    struct st_layout l;
    struct st_writer *w;
    snprintf(full, sizeof full, "%s/model.safetensors", model_folder);
    assert_int_equal(st_layout_init(&t, 1, &l, NULL), 0);
    assert_int_equal(st_create(full, &l, NULL), 0);
    assert_int_equal(st_writer_open(full, &l, &w, NULL), 0);
    assert_int_equal(st_write_bytes(w, 0, (const uint8_t *)tower, NULL), 0);
    assert_int_equal(st_writer_close(w, NULL), 0);
    st_layout_fini(&l);
}

static void write_config(const char *text)
{
    char full[200];
    snprintf(full, sizeof full, "%s/config.json", model_folder);
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void what_is_not_computed_goes_along(void **state)
{
    (void)state;
    struct safetensors *st = NULL;
    char full[200];
    write_tower();
    run((struct layout_degrees){2, 2, 1, 0}, save, (struct job){.step = 4});
    snprintf(full, sizeof full, "%s/model.safetensors", model_folder);
    unlink(full);
    assert_true(exists("step-4/model.safetensors.index.json"));
    assert_false(exists("step-4/model.safetensors"));
    snprintf(full, sizeof full, "%s/step-4", path);
    assert_int_equal(safetensors_open(full, &st, NULL), 0);
    assert_int_equal(safetensors_count(st), map.n_entries + 1);
    const struct st_view *v = safetensors_find(st, "vision_tower.patch.weight");
    assert_int_equal(v->tensor.dtype, ST_BF16);
    assert_int_equal(v->n_bytes, sizeof tower);
    assert_memory_equal(v->data, tower, sizeof tower);
    safetensors_close(st);
    run((struct layout_degrees){1, 1, 1, 0}, load, (struct job){.step = 4});
}

/* Weights are read from their packed form and written plain. */
static void an_exported_config_does_not_call_weights_packed(void **state)
{
    (void)state;
    char text[200] = "", full[200];
    write_config("{\"eps\": 1e-05, \"text_config\": {\"quantization_config\": {\"bits\": 4},"
                 "\"hidden_size\": 8}}");
    run((struct layout_degrees){1, 1, 1, 0}, save, (struct job){.step = 4});
    write_config("{}\n");
    snprintf(full, sizeof full, "%s/step-4/config.json", path);
    FILE *f = fopen(full, "r");
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    assert_null(strstr(text, "quantization_config"));
    assert_non_null(strstr(text, "1e-05"));
    assert_non_null(strstr(text, "hidden_size"));
}

static void saving_twice_changes_nothing(void **state)
{
    (void)state;
    run((struct layout_degrees){2, 2, 1, 0}, save, (struct job){.step = 4});
    run((struct layout_degrees){1, 1, 1, 0}, save, (struct job){.step = 4});
    run((struct layout_degrees){1, 1, 1, 0}, load, (struct job){.step = 4});
}

/* In a child, because it dies. */
static void save_and_die(const char *wish, struct job job)
{
    pid_t pid = fork();
    if (pid == 0) {
        setenv("BALLAST_FAILPOINT", wish, 1);
        run((struct layout_degrees){2, 2, 2, 0}, save, job);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void a_crash_leaves_the_old_or_the_new(void **state)
{
    (void)state;
    struct layout_degrees d = {2, 2, 2, 0};
    run(d, save, (struct job){.step = 2, .keep = 1});
    save_and_die("checkpoint-write:3:kill", (struct job){.step = 4, .keep = 1});
    assert_true(exists("step-4.tmp"));
    run(d, load, (struct job){.step = 2});
    assert_false(exists("step-4.tmp"));
    save_and_die("checkpoint-before-rename:1:kill", (struct job){.step = 4, .keep = 1});
    assert_true(exists("step-4.tmp"));
    run(d, load, (struct job){.step = 2});
    save_and_die("checkpoint-after-rename:1:kill", (struct job){.step = 4, .keep = 1});
    assert_true(exists("step-2"));
    run(d, load, (struct job){.step = 4});
}

static void a_full_disk_leaves_the_old(void **state)
{
    (void)state;
    struct layout_degrees d = {4, 2, 2, 0};
    run(d, save, (struct job){.step = 2});
    setenv("BALLAST_FAILPOINT", "checkpoint-write:100:enospc", 1);
    run(d, save, (struct job){.step = 4, .expect = "No space left on device"});
    unsetenv("BALLAST_FAILPOINT");
    assert_false(exists("step-4.tmp") || exists("step-4"));
    run(d, load, (struct job){.step = 2});
}

static void damage(const char *name, off_t size)
{
    char full[200];
    snprintf(full, sizeof full, "%s/%s", path, name);
    assert_int_equal(truncate(full, size), 0);
}

static void a_damaged_checkpoint_is_refused_with_what_to_do(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        off_t size;
        const char *text;
    } rows[] = {
        {"step-4/model.safetensors", 5000, "the newest checkpoint cannot be used: /"},
        {"step-4/model.safetensors", 5000, "; if it is damaged, 'mv /"},
        {"step-4/ballast/m/model.safetensors", 0, "ballast/m/model.safetensors"},
        {"step-4/ballast/state.json", 4, "state.json"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        empty_path(NULL);
        run((struct layout_degrees){2, 2, 1, 0}, save, (struct job){.step = 4});
        damage(rows[i].file, rows[i].size);
        run((struct layout_degrees){2, 1, 2, 0}, load,
            (struct job){.step = 4, .expect = rows[i].text});
    }
}

/* One bit of the last byte but 5, which is a tensor's. */
static void flip_bit(const char *name)
{
    char full[200];
    snprintf(full, sizeof full, "%s/%s", path, name);
    FILE *f = fopen(full, "r+");
    assert_non_null(f);
    assert_int_equal(fseek(f, -6, SEEK_END), 0);
    int byte = fgetc(f);
    assert_true(byte >= 0);
    assert_int_equal(fseek(f, -6, SEEK_END), 0);
    assert_int_equal(fputc(byte ^ 4, f), byte ^ 4);
    fclose(f);
}

static void a_bit_that_flips_is_noticed(void **state)
{
    (void)state;
    static const char *const files[] = {
        "step-4/model.safetensors", "step-4/ballast/m/model.safetensors",
        "step-4/ballast/v/model.safetensors",
    };
    char expect[64];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        empty_path(NULL);
        run((struct layout_degrees){4, 2, 2, 0}, save, (struct job){.step = 4});
        run((struct layout_degrees){2, 1, 2, 0}, load, (struct job){.step = 4});
        flip_bit(files[i]);
        snprintf(expect, sizeof expect, "%s: tensor '", files[i]);
        run((struct layout_degrees){2, 1, 2, 0}, load, (struct job){.step = 4, .expect = expect});
        run((struct layout_degrees){1, 1, 1, 0}, load,
            (struct job){.step = 4, .expect = "' is damaged: its checksum is "});
        flip_bit(files[i]);
        run((struct layout_degrees){1, 1, 1, 0}, load, (struct job){.step = 4});
    }
}

static void a_checkpoint_without_checksums_is_an_older_one(void **state)
{
    (void)state;
    char full[200];
    run((struct layout_degrees){4, 2, 2, 0}, save, (struct job){.step = 4});
    snprintf(full, sizeof full, "%s/step-4/ballast/checksums.json", path);
    assert_int_equal(unlink(full), 0);
    run((struct layout_degrees){2, 2, 1, 0}, load, (struct job){.step = 4});
}

static void two_runs_never_share_a_path(void **state)
{
    (void)state;
    run((struct layout_degrees){1, 1, 1, 0}, save, (struct job){.step = 4});
    char full[200];
    snprintf(full, sizeof full, "%s/.lock", path);
    int held[2];
    assert_int_equal(pipe(held), 0);
    pid_t pid = fork();
    if (pid == 0) {
        flock(open(full, O_RDWR), LOCK_EX);
        if (write(held[1], "", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(held[0], &(char){0}, 1), 1);
    close(held[0]);
    close(held[1]);
    struct shard *s = NULL;
    struct layout layout = {0};
    struct slots slots = {0};
    struct coll *coll = NULL;
    struct device *dev = NULL;
    struct err err = {0};
    uint8_t id[16] = "two runs";
    struct coll_host_config cc = {.id = id, .world = 1, .open_timeout_ns = NS_PER_S};
    assert_int_equal(layout_init((struct layout_degrees){1, 1, 1, 0}, 8, 0, &layout, &err), 0);
    assert_int_equal(device_cpu_open(1, true, &dev, &err), 0);
    assert_int_equal(coll_host_open(&cc, &coll, &err), 0);
    assert_int_equal(slots_init(&slots, &spec, &layout, 0, &err), 0);
    assert_int_equal(shard_open(&map, &spec, &layout, &slots, coll, dev, &s, &err), 0);
    struct ckpt_config c = {.path = path, .model_path = model_folder, .spec = &spec, .map = &map,
                            .shard = s, .coll = coll};
    int lock = -1;
    uint64_t step = 0;
    assert_int_equal(ckpt_find(&c, 200 * NS_PER_MS, &lock, &step, &err), -EBUSY);
    assert_non_null(strstr(err.text, "another run writes there"));
    c.path = full;
    assert_int_equal(ckpt_find(&c, 0, &lock, &step, &err), -ENOTDIR);
    assert_non_null(strstr(err.text, " is a file; give this job a folder"));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    shard_close(s);
    coll->ops->close(coll);
    dev->ops->close(dev);
    slots_fini(&slots);
    layout_fini(&layout);
}

/* user: one float per element of the model, as the first layout has it. */
static void init_weights(struct test_rank *r)
{
    float *all = r->user;
    uint64_t at = 0;
    ckpt_init_weights(r->shard, r->map, r->spec, 7);
    for (size_t t = 0; t < r->map->n_entries; at += r->map->entries[t].count, t++) {
        struct shard_part p;
        if (!shard_part(r->shard, &r->map->entries[t], &p))
            continue;
        for (uint64_t i = 0; i < p.count && r->degrees.world == 1; i++)
            all[at + p.first + i] = p.weights[i];
        for (uint64_t i = 0; i < p.count; i++)
            RANK_CHECK(r, all[at + p.first + i] == p.weights[i]);
    }
}

static void initial_weights_do_not_know_the_layout(void **state)
{
    (void)state;
    uint64_t n = 0, n_normal = 0;
    for (size_t t = 0; t < map.n_entries; t++)
        n += map.entries[t].count;
    float *all = calloc(n, sizeof *all);
    for (size_t i = 0; i < N_TEST_LAYOUTS; i++)
        test_ranks_run(test_layouts[i], &spec, &map, init_weights, all);
    double sum = 0, squares = 0;
    uint64_t at = 0;
    for (size_t t = 0; t < map.n_entries; at += map.entries[t].count, t++) {
        for (uint64_t i = 0; i < map.entries[t].count; i++) {
            if (map.entries[t].init == INIT_ONES)
                assert_true(all[at + i] == 1);
            if (map.entries[t].init != INIT_NORMAL)
                continue;
            sum += all[at + i];
            squares += (double)all[at + i] * all[at + i];
            n_normal++;
        }
    }
    double std = sqrt(squares / (double)n_normal);
    assert_true(fabs(std / 0.02 - 1) < 0.02);
    assert_true(fabs(sum / (double)n_normal) < 0.02 * 5 / sqrt((double)n_normal));
    free(all);
}

static int forget_all(void **state)
{
    tensor_map_fini(&map);
    return remove_folder(state);
}

int main(void)
{
    struct err err = {0};
    spec = test_spec();
    if (make_folder(NULL) < 0 || tensor_map_init(&spec, &map, &err) < 0)
        return 1;
    snprintf(model_folder, sizeof model_folder, "%s/model", folder);
    snprintf(path, sizeof path, "%s/deep/er/run", folder);
    mkdir(model_folder, 0777);
    char config[200];
    snprintf(config, sizeof config, "%s/config.json", model_folder);
    FILE *f = fopen(config, "w");
    if (!f || fputs("{}\n", f) < 0)
        return 1;
    fclose(f);
#define CASE(name) cmocka_unit_test_setup(name, empty_path)
    const struct CMUnitTest tests[] = {
        CASE(a_run_resumes_on_any_layout),
        CASE(second_moments_are_kept_where_they_are_used),
        CASE(many_files_read_as_one),
        CASE(other_tools_find_published_names_and_padding),
        CASE(what_is_not_computed_goes_along),
        CASE(an_exported_config_does_not_call_weights_packed),
        CASE(saving_twice_changes_nothing),
        CASE(a_crash_leaves_the_old_or_the_new),
        CASE(a_full_disk_leaves_the_old),
        CASE(a_damaged_checkpoint_is_refused_with_what_to_do),
        CASE(a_bit_that_flips_is_noticed),
        CASE(a_checkpoint_without_checksums_is_an_older_one),
        CASE(two_runs_never_share_a_path),
        CASE(initial_weights_do_not_know_the_layout),
    };
    return cmocka_run_group_tests(tests, NULL, forget_all);
}
