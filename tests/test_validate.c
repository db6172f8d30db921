/* test_validate.c - the reference fixture on every layout, and what the command says when it is off
 *
 * Needs the folder of reference data (BALLAST_SHARED). */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/hf_config.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "tests/folder.h"
#include "worker/validate.h"

static char fixture[512];
static const char *const families[] = { "kimi-linear-tiny", "deepseek-v3-tiny",
                                        "deepseek-v32-tiny", "kimi-k3-tiny-mxfp4" };

static int find_fixture(void **state)
{
    const char *shared = getenv("BALLAST_SHARED");
    if (shared && *shared)
        snprintf(fixture, sizeof fixture, "%s/oracle/kimi-k3-tiny", shared);
    else
        print_message("SKIPPED: BALLAST_SHARED does not name the folder of reference data\n");
    return make_folder(state);
}

/* Runs the command with what it prints in FOLDER/out and FOLDER/err; gives the texts. */
struct said {
    int  code;
    char out[8192], err[4096];
};

static void read_text(const char *name, char *to, size_t n_bytes)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    to[fread(to, 1, n_bytes - 1, f)] = '\0';
    fclose(f);
    free(path);
}

static int redirect(int fd, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    int old = dup(fd), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(old >= 0 && file >= 0 && dup2(file, fd) == fd);
    close(file);
    free(path);
    return old;
}

static void restore(int fd, int old)
{
    assert_int_equal(dup2(old, fd), fd);
    close(old);
}

static struct said run(const char *const *arguments)
{
    static struct said s;
    char *argv[16] = { strdup("validate") };
    int argc = 1;

    while (arguments[argc - 1]) {
        argv[argc] = strdup(arguments[argc - 1]);
        argc++;
    }
    fflush(NULL);
    int out = redirect(STDOUT_FILENO, "out"), err = redirect(STDERR_FILENO, "err");
    s.code = validate_main(argc, argv);
    fflush(NULL);
    restore(STDOUT_FILENO, out);
    restore(STDERR_FILENO, err);
    for (int i = 0; i < argc; i++)
        free(argv[i]);
    read_text("out", s.out, sizeof s.out);
    read_text("err", s.err, sizeof s.err);
    return s;
}

#define RUN(...) run((const char *const[]){ __VA_ARGS__, NULL })

static void need_fixture(void)
{
    if (!fixture[0])
        skip();
}

/* The worst figure of a row of the table. */
static double figure(const char *table, const char *row)
{
    const char *line = strstr(table, row);
    assert_non_null(line);
    return strtod(line + 22, NULL);
}

/* ---- the fixture ---------------------------------------------------------------------------- */

static void check_layout(uint32_t ranks, uint32_t fsdp, uint32_t ep, uint32_t shard)
{
    static const char *const rows[] = { "logits", "loss  ", "gradients", "packed logits",
                                        "packed loss", "loss curve" };
    char layout[80];
    snprintf(layout, sizeof layout, "ranks=%u,fsdp=%u,ep=%u,expert_shard=%u", ranks, fsdp, ep,
             shard);
    struct said s = RUN(fixture, "--expect", fixture, "--layout", layout);
    if (s.code != 0)
        fail_msg("%s: %d\n%s%s", layout, s.code, s.out, s.err);
    print_message("%-40s", layout);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        print_message(" %s %.1e", rows[i], figure(s.out, rows[i]));
    print_message("\n");
}

static void the_fixture_is_met_on_every_layout(void **state)
{
    (void)state;
    need_fixture();
    for (uint32_t ranks = 1; ranks <= 4; ranks *= 2)
        for (uint32_t fsdp = 1; fsdp <= ranks; fsdp *= 2)
            for (uint32_t ep = 1; ep <= ranks; ep *= 2)
                for (uint32_t shard = 1; shard <= ranks / ep; shard *= 2)
                    check_layout(ranks, fsdp, ep, shard);
}

/* Other families differ in their layers, not in how these are sharded. */
static void every_family_meets_its_fixture(void **state)
{
    (void)state;
    static const char *const layouts[] = { "ranks=1", "ranks=2,fsdp=2,ep=2",
                                           "ranks=4,fsdp=4,ep=2,expert_shard=1" };
    need_fixture();
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        char *path = xasprintf("%s/../%s", fixture, families[f]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            struct said s = RUN(path, "--expect", path, "--layout", layouts[i]);
            if (s.code != 0)
                fail_msg("%s %s: %d\n%s%s", families[f], layouts[i], s.code, s.out, s.err);
            print_message("%-18s %-36s logits %.1e", families[f], layouts[i],
                          figure(s.out, "logits"));
            if (strstr(s.out, "loss curve"))
                print_message(" gradients %.1e curve %.1e", figure(s.out, "gradients"),
                              figure(s.out, "loss curve"));
            if (strcmp(families[f], "kimi-linear-tiny") == 0 ||
                strcmp(families[f], "deepseek-v32-tiny") == 0)
                print_message(" lora curve %.1e adapter %.1e", figure(s.out, "lora loss curve"),
                              figure(s.out, "lora adapter"));
            print_message("\n");
        }
        free(path);
    }
}

/* ---- moves ---- */

/* The digest that the command printed. */
static const char *digest_of(const char *out)
{
    const char *line = strstr(out, "digest of weights and state after the curve: ");
    assert_non_null(line);
    return strchr(line, ':');
}

static void moves_keep_the_curve_and_in_deterministic_mode_every_bit(void **state)
{
    (void)state;
    static const char *const layouts[] = {
        "ranks=4,fsdp=4,ep=4", "ranks=4,fsdp=2,ep=2,expert_shard=1",
        "ranks=4,fsdp=1,ep=2,expert_shard=2", "ranks=2,fsdp=2,ep=2",
    };
    need_fixture();
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct said s = RUN(fixture, "--expect", fixture, "--layout", layouts[i],
                            "--deterministic");
        assert_int_equal(s.code, 0);
        char *still = strdup(digest_of(s.out)), *curve = strdup(strstr(s.out, "loss curve"));
        for (uint32_t seed = 1; seed < 4; seed++) {
            char *text = xasprintf("%u", seed);
            s = RUN(fixture, "--expect", fixture, "--layout", layouts[i], "--deterministic",
                    "--moves-every", "5", "--seed", text);
            assert_int_equal(s.code, 0);
            if (strcmp(digest_of(s.out), still) != 0 || strncmp(curve, strstr(s.out, "loss curve"),
                                                                strcspn(curve, "\n")) != 0)
                fail_msg("%s seed %u:\n%s", layouts[i], seed, s.out);
            free(text);
        }
        s = RUN(fixture, "--expect", fixture, "--layout", layouts[i], "--moves-every", "5");
        if (s.code != 0) /* tolerances are those of float32, 1e-4 for the curve */
            fail_msg("%s:\n%s%s", layouts[i], s.out, s.err);
        print_message("%-36s%s", layouts[i], strstr(s.out, "after the curve"));
        free(still);
        free(curve);
    }
}

/* ---- recomputation ---- */

static void what_is_made_again_changes_no_bit(void **state)
{
    (void)state;
    static const char *const models[] = { "kimi-k3-tiny", "deepseek-v32-tiny", "kimi-linear-tiny" };
    static const char *const layouts[] = { "ranks=1", "ranks=2,fsdp=2,ep=2",
                                           "ranks=4,fsdp=2,ep=2,expert_shard=2" };
    need_fixture();
    for (size_t i = 0; i < 3 * sizeof models / sizeof *models; i++) {
        char *path = xasprintf("%s/oracle/%s", getenv("BALLAST_SHARED"), models[i / 3]);
        char *digest = NULL, *curve = NULL;
        for (int how = RECOMPUTE_OFF; how < RECOMPUTE_WAYS; how++) {
            struct said s = RUN(path, "--expect", path, "--layout", layouts[i % 3], "--steps", "5",
                                "--deterministic", "--recompute", recompute_words[how]);
            if (s.code != 0)
                fail_msg("%s %s:\n%s%s", models[i / 3], recompute_words[how], s.out, s.err);
            if (!digest) {
                digest = strdup(digest_of(s.out));
                curve = strndup(strstr(s.out, "loss curve"),
                                strcspn(strstr(s.out, "loss curve"), "\n"));
            }
            if (strcmp(digest_of(s.out), digest) != 0 || !strstr(s.out, curve))
                fail_msg("%s, %s: %s is not off:\n%s", models[i / 3], layouts[i % 3],
                         recompute_words[how], s.out);
        }
        free(digest);
        free(curve);
        free(path);
    }
}

/* ---- dumps ---------------------------------------------------------------------------------- */

static void dumps_hold_what_was_computed(void **state)
{
    (void)state;
    need_fixture();
    char *dump = xasprintf("%s/dump", folder), *path;
    struct safetensors *mine, *expected;
    struct json *report;
    struct said s = RUN(fixture, "--expect", fixture, "--steps", "2", "--layout",
                        "ranks=2,fsdp=2,ep=2,sp=1", "--dump", dump);
    assert_int_equal(s.code, 0);

    path = xasprintf("%s/gradients.safetensors", dump);
    assert_int_equal(safetensors_open(path, &mine, NULL), 0);
    free(path);
    path = xasprintf("%s/gradients/model.safetensors", fixture);
    assert_int_equal(safetensors_open(path, &expected, NULL), 0);
    free(path);
    for (size_t i = 0; i < safetensors_count(expected); i++) {
        const struct st_view *e = safetensors_at(expected, i);
        const struct st_view *v = safetensors_find(mine, e->tensor.name);
        assert_non_null(v);
        assert_memory_equal(v->tensor.dims, e->tensor.dims, sizeof e->tensor.dims);
    }
    assert_null(safetensors_find(mine, "language_model.model.layers.1.block_sparse_moe.gate."
                                       "e_score_correction_bias"));
    safetensors_close(mine);
    safetensors_close(expected);

    path = xasprintf("%s/logits.safetensors", dump);
    assert_int_equal(safetensors_open(path, &mine, NULL), 0);
    assert_int_equal(safetensors_find(mine, "logits")->n_elements, 2 * 100 * 256);
    assert_int_equal(safetensors_find(mine, "packed_logits")->n_elements, 150 * 256);
    safetensors_close(mine);
    free(path);

    path = xasprintf("%s/report.json", dump);
    uint64_t parameters = 0;
    double loss = 0;
    assert_int_equal(json_read_file(path, 1 << 20, &report, NULL), 0);
    assert_int_equal(json_get_u64(report, "parameters", 0, UINT64_MAX, &parameters, NULL), 0);
    assert_int_equal(json_get_double(report, "loss", &loss, NULL), 0);
    assert_int_equal(parameters, 808908);
    assert_float_equal(loss, 5.9727559, 1e-4);
    assert_int_equal(json_count(json_get(report, "loss_curve")), 2);
    json_destroy(report);
    free(path);
    free(dump);
}

/* ---- a model that is off -------------------------------------------------------------------- */

static void copy_file(const char *from_folder, const char *to_folder, const char *name)
{
    char *command = xasprintf("cp '%s/%s' %s/%s && chmod u+w %s/%s", from_folder, name, to_folder,
                              name, to_folder, name);
    assert_int_equal(system(command), 0);
    free(command);
}

/* A copy of the model with one tensor scaled. */
static char *damaged_model(const char *tensor, float factor)
{
    char *model = xasprintf("%s/model", folder), *path;
    struct safetensors *st;
    mkdir(model, 0777);
    copy_file(fixture, model, "config.json");
    copy_file(fixture, model, "model.safetensors");
    path = xasprintf("%s/model.safetensors", model);
    assert_int_equal(safetensors_open(path, &st, NULL), 0);
    const struct st_view *v = safetensors_find(st, tensor), *first = v;
    float *x = xcalloc(v->n_elements, sizeof *x);
    assert_int_equal(st_read_f32(v, 0, v->n_elements, x, NULL), 0);
    for (uint64_t i = 0; i < v->n_elements; i++)
        x[i] *= factor;
    for (size_t i = 0; i < safetensors_count(st); i++) /* the data begin with the lowest view */
        if (safetensors_at(st, i)->data < first->data)
            first = safetensors_at(st, i);
    struct stat s;
    assert_int_equal(stat(path, &s), 0);
    uint64_t data_bytes = 0;
    for (size_t i = 0; i < safetensors_count(st); i++)
        data_bytes += safetensors_at(st, i)->n_bytes;
    off_t at = s.st_size - (off_t)data_bytes + (v->data - first->data);
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, x, 4 * v->n_elements, at), (ssize_t)(4 * v->n_elements));
    close(fd);
    safetensors_close(st);
    free(x);
    free(path);
    return model;
}

static void a_wrong_weight_is_found_and_named(void **state)
{
    (void)state;
    need_fixture();
    char *model = damaged_model("language_model.lm_head.weight", 1.01f);
    struct said s = RUN(model, "--expect", fixture, "--steps", "0");
    assert_int_equal(s.code, 1);
    assert_non_null(strstr(s.out, "ABOVE TOLERANCE"));
    assert_non_null(strstr(s.out, "first module to diverge, from the loss backwards: "
                                  "language_model.lm_head\n"));
    assert_true(figure(s.out, "logits") > 1e-3);
    free(model);
}

static void a_damaged_fixture_is_one_clear_line(void **state)
{
    (void)state;
    need_fixture();
    char *copy = xasprintf("%s/fixture", folder), *path = xasprintf("%s/expected.json", copy);
    mkdir(copy, 0777);
    struct said s = RUN(fixture, "--expect", copy);
    assert_int_equal(s.code, 1);
    assert_non_null(strstr(s.err, "expected.json"));

    FILE *f = fopen(path, "w");
    fputs("{\"loss\": 1, \"loss_curve\": [1, 2]}", f);
    fclose(f);
    s = RUN(fixture, "--expect", copy);
    assert_int_equal(s.code, 1);
    assert_non_null(strstr(s.err, "'adamw' needs the numbers lr, betas, eps and weight_decay"));

    f = fopen(path, "w");
    fputs("{\"loss\": 1}", f);
    fclose(f);
    s = RUN(fixture, "--expect", copy);
    assert_int_equal(s.code, 1);
    assert_non_null(strstr(s.err, "expected.safetensors"));

    s = RUN(copy, "--expect", fixture); /* a model folder without a config */
    assert_int_equal(s.code, 1);
    assert_non_null(strstr(s.err, "fixture/config.json"));
    free(copy);
    free(path);
}

/* ---- bfloat16, played by weights that are rounded once more ---- */

struct case_of_bf16 {
    struct model_spec *spec;
    struct tensor_map map;
    struct fixture fixture;
    struct validation v;
};

static void run_rounded(struct case_of_bf16 *c, const char *path)
{
    struct err err = {0};
    c->spec = xcalloc(1, sizeof *c->spec);
    assert_int_equal(hf_config_read(path, c->spec, &err), 0);
    assert_int_equal(tensor_map_init(c->spec, &c->map, &err), 0);
    assert_int_equal(fixture_open(path, c->spec, &c->fixture, &err), 0);
    struct stack_config config = { .spec = c->spec, .map = &c->map, .degrees = { 1, 1, 1, 0 },
                                   .tokens_max = validation_tokens_max(&c->fixture) };
    uint32_t n_steps = c->fixture.n_steps < 3 ? c->fixture.n_steps : 3;
    const char *adapter = n_steps ? c->fixture.lora_start : NULL;
    assert_int_equal(validation_run(&config, path, &c->fixture, n_steps,
                                    (struct validation_moves){0}, ROUNDED_RUNS + 1, &c->v, &err),
                     0);
    if (adapter)
        assert_int_equal(validation_lora(&config, adapter, &c->v, &err), 0);
    assert_int_equal(validation_add_rounded(&config, adapter, &c->v, &err), 0);
    c->v.elem = ELEM_BF16;
}

static struct verdict verdict_on(const struct case_of_bf16 *c)
{
    struct verdict verdict;
    struct err err = {0};
    assert_int_equal(verdict_of(&c->v, &c->map, &verdict, &err), 0);
    return verdict;
}

static void bf16_may_be_off_as_far_as_rounded_weights_are(void **state)
{
    (void)state;
    need_fixture();
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        char *path = xasprintf("%s/../%s", fixture, families[f]);
        struct case_of_bf16 c = {0};
        run_rounded(&c, path);
        struct verdict verdict = verdict_on(&c);
        if (!verdict.is_met)
            verdict_print(&verdict);
        assert_true(verdict.is_met);
        assert_true(verdict.rows[ROW_LOGITS].rounded > 3e-2); /* what the rule is for */

        c.v.loss *= 1.05; /* a fault is not excused */
        verdict = verdict_on(&c);
        assert_false(verdict.is_met);
        c.v.loss /= 1.05;
        size_t n = (size_t)c.fixture.batch.n_rows * c.fixture.batch.length * c.spec->vocab;
        for (size_t i = 0; i < n; i++)
            c.v.logits[i] *= -1;
        verdict = verdict_on(&c);
        assert_false(verdict.is_met);
        validation_fini(&c.v, &c.map);
        fixture_close(&c.fixture);
        tensor_map_fini(&c.map);
        free(c.spec);
        free(path);
    }
}

/* ---- usage ---------------------------------------------------------------------------------- */

static void wrong_options_are_usage_errors(void **state)
{
    (void)state;
    static const struct { const char *arguments[6]; const char *says; } cases[] = {
        { { "m" }, "--expect FIXTURE_DIR is missing" },
        { { "--expect", "f" }, "expected one MODEL_DIR, got 0" },
        { { "m", "n", "--expect", "f" }, "expected one MODEL_DIR, got 2" },
        { { "m", "--expect", "f", "--steps", "x" }, "--steps 'x'" },
        { { "m", "--expect", "f", "--device", "tpu" }, "expected cpu or cuda:N" },
        { { "m", "--expect", "f", "--dtype", "f8" }, "supported: f32, bf16" },
        { { "m", "--expect", "f", "--layout", "ranks=0" }, "'ranks' needs a number" },
        { { "m", "--expect", "f", "--layout", "rank=2" },
          "'rank' is unknown; known: ranks, fsdp, ep, expert_shard, sp" },
        { { "m", "--expect", "f", "--layout", "ranks=2,sp=2" }, "sp 2 is not supported" },
        { { "m", "--expect", "f", "--fast" }, "unknown option" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct said s = run(cases[i].arguments);
        bool is_one_line = strchr(s.err, '\n') == s.err + strlen(s.err) - 1;
        if (s.code != 2 || !strstr(s.err, cases[i].says) || !is_one_line)
            fail_msg("case %zu: %d %s", i, s.code, s.err);
    }
    struct said s = RUN("--help");
    assert_int_equal(s.code, 0);
    assert_non_null(strstr(s.out, "usage: ballast-worker validate"));
}

static void a_layout_that_does_not_divide_is_named(void **state)
{
    (void)state;
    need_fixture();
    struct said s = RUN(fixture, "--expect", fixture, "--layout", "ranks=4,fsdp=3");
    assert_int_equal(s.code, 1);
    assert_non_null(strstr(s.err, "fsdp_shard_degree 3 does not divide 4 workers; use one of "
                                  "1, 2, 4"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_fixture_is_met_on_every_layout),
        cmocka_unit_test(every_family_meets_its_fixture),
        cmocka_unit_test(what_is_made_again_changes_no_bit),
        cmocka_unit_test(moves_keep_the_curve_and_in_deterministic_mode_every_bit),
        cmocka_unit_test(dumps_hold_what_was_computed),
        cmocka_unit_test(a_wrong_weight_is_found_and_named),
        cmocka_unit_test(bf16_may_be_off_as_far_as_rounded_weights_are),
        cmocka_unit_test(a_damaged_fixture_is_one_clear_line),
        cmocka_unit_test(wrong_options_are_usage_errors),
        cmocka_unit_test(a_layout_that_does_not_divide_is_named),
    };
    return cmocka_run_group_tests(tests, find_fixture, remove_folder);
}
