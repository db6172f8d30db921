/* test_job_file.c - the job file: defaults, what goes together, the page, round trips */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/mem.h"
#include "proto/job_degrees.h"
#include "proto/job_file.h"

static const char base[] =
    "name: hybrid-mini\n"
    "model: {path: models/hybrid-mini}\n"
    "data: {train: [text/*.txt]}\n"
    "train: {steps: 300}\n"
    "checkpoint: {path: checkpoints/hybrid-mini}\n";

/* Every key of the contract's example. */
static const char whole[] =
    "name: hybrid-mini\n"
    "model:\n"
    "  path: models/hybrid-mini\n"
    "  init_seed: 1\n"
    "  base_precision: bf16\n"
    "data:\n"
    "  train: [text/*.txt]\n"
    "  validation: [text/held-out.txt]\n"
    "  format: bytes\n"
    "  sequence_length: 512\n"
    "  pack: true\n"
    "train:\n"
    "  mode: full\n"
    "  steps: 300\n"
    "  global_batch: 32\n"
    "  micro_batch: 2\n"
    "  precision: f32\n"
    "  seed: 1\n"
    "  deterministic: false\n"
    "  on_nan: stop\n"
    "  optimizer: {name: adamw, lr: 3e-3, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1,\n"
    "              decay: matrices, clip_grad_norm: 1.0}\n"
    "  schedule: {name: cosine, warmup_steps: 20, min_lr: 3e-4}\n"
    "  lora: {r: 8, alpha: 16, targets: [q_proj, o_proj, experts], shared_a: false}\n"
    "  indexer: {stage: sparse, loss_coefficient: 1.0}\n"
    "parallel:\n"
    "  workers: 4\n"
    "  fsdp_shard_degree: 2\n"
    "  expert_parallel_degree: 4\n"
    "  expert_shard_degree: auto\n"
    "  sequence_parallel_degree: 1\n"
    "  tensor_parallel_degree: 1\n"
    "  activation_checkpointing: full\n"
    "  offload: off\n"
    "  overlap: true\n"
    "  hierarchical_all_to_all: auto\n"
    "moe:\n"
    "  capacity_factor: 0\n"
    "  overflow: drop\n"
    "  drop_by: probability\n"
    "  aux_loss: 0.0\n"
    "  aux_scope: global\n"
    "  z_loss: 0.0\n"
    "  bias_update: quantile\n"
    "  bias_update_rate: 1e-3\n"
    "rebalance: {auto: true, spare_slots_per_rank: 1, window_steps: 20, horizon_steps: 200,\n"
    "            min_gain: 0.02}\n"
    "checkpoint: {path: checkpoints/hybrid-mini, every_steps: 100, keep: 3}\n"
    "scheduling: {priority: 0, max_restarts: 3, time_limit: 2h, after: []}\n";

static Ballast__JobSpec *read_good(const char *text)
{
    Ballast__JobSpec *spec = NULL;
    struct problems p = {0};
    int rc = job_file_read_text("job.yaml", "/jobs", text, strlen(text), &spec, &p);
    problems_print(&p, stderr);
    assert_int_equal(rc, 0);
    return spec;
}

static void the_whole_example_is_read(void **state)
{
    (void)state;
    Ballast__JobSpec *s = read_good(whole);
    assert_string_equal(s->name, "hybrid-mini");
    assert_string_equal(s->model_path, "/jobs/models/hybrid-mini");
    assert_string_equal(s->data_train[0], "/jobs/text/*.txt");
    assert_string_equal(s->data_validation[0], "/jobs/text/held-out.txt");
    assert_string_equal(s->checkpoint_path, "/jobs/checkpoints/hybrid-mini");
    assert_int_equal(s->train_micro_batch, 2);
    assert_true(s->optimizer_lr == 3e-3 && s->schedule_min_lr == 3e-4);
    assert_true(s->n_optimizer_betas == 2 && s->optimizer_betas[1] == 0.95);
    assert_int_equal(s->n_lora_targets, 3);
    assert_int_equal(s->parallel_expert_shard_degree, 0);
    assert_string_equal(s->parallel_activation_checkpointing, "full");
    assert_string_equal(s->parallel_offload, "off");
    assert_int_equal(s->scheduling_time_limit_s, 7200);
    struct problems p = {0};
    assert_int_equal(job_spec_check(s, &p), 0);
    struct layout_degrees d = job_spec_degrees(s);
    assert_true(d.world == 4 && d.fsdp == 2 && d.ep == 4 && d.expert_shard == 0);
    job_file_free(s);
}

static void defaults_make_a_job(void **state)
{
    (void)state;
    Ballast__JobSpec *s = read_good(base);
    assert_string_equal(s->train_mode, "full");
    assert_int_equal(s->train_global_batch, 32);
    assert_int_equal(s->parallel_workers, 1);
    assert_int_equal(s->checkpoint_every_steps, 100);
    assert_int_equal(s->scheduling_time_limit_s, 0);
    assert_int_equal(s->n_data_validation, 0);
    job_file_free(s);
}

static void it_survives_the_wire_and_protobufs_own_free(void **state)
{
    (void)state;
    Ballast__JobSpec *s = read_good(whole);
    size_t n = ballast__job_spec__get_packed_size(s);
    uint8_t *bytes = xcalloc(1, n);
    ballast__job_spec__pack(s, bytes);
    Ballast__JobSpec *back = ballast__job_spec__unpack(NULL, n, bytes);
    struct problems p = {0};
    assert_int_equal(job_spec_check(back, &p), 0);
    char *text = job_file_text(s), *again = job_file_text(back);
    assert_string_equal(text, again);
    free(text);
    free(again);
    ballast__job_spec__free_unpacked(back, NULL);
    ballast__job_spec__free_unpacked(s, NULL);
    free(bytes);
}

static void a_spec_by_wire_meets_the_same_limits(void **state)
{
    (void)state;
    Ballast__JobSpec *s = read_good(whole);
    struct problems p = {0};
    s->train_steps = 0;
    s->optimizer_betas[0] = 1;
    free(s->train_mode);
    s->train_mode = xstrdup("fast");
    assert_int_equal(job_spec_check(s, &p), -EINVAL);
    char *said = problems_text(&p);
    assert_string_equal(said,
        "key 'train.mode': 'fast' is not allowed; allowed: full, lora, indexer\n"
        "key 'train.steps': 0 is out of range, allowed 1 to 1e9\n"
        "key 'train.optimizer.betas': 1 is out of range, allowed more than 0 to less than 1");
    assert_string_equal(p.items[1].key, "train.steps");
    free(said);
    problems_fini(&p);
    job_file_free(s);

    Ballast__JobSpec empty; /* all defaults of protobuf: nothing crashes, everything is said */
    ballast__job_spec__init(&empty);
    assert_int_equal(job_spec_check(&empty, &p), -EINVAL);
    assert_true(p.n_total > 20);
    problems_fini(&p);

    s = read_good(whole);
    free(s->model_path);
    s->model_path = xstrdup("relative");
    assert_int_equal(job_spec_check(s, &p), -EINVAL);
    assert_string_equal(p.items[0].text, "key 'model.path': 'relative' is not an absolute path");
    problems_fini(&p);
    job_file_free(s);
}

static void what_is_written_reads_back(void **state)
{
    (void)state;
    Ballast__JobSpec *s = read_good(whole);
    char *text = job_file_text(s);
    Ballast__JobSpec *back = read_good(text);
    char *again = job_file_text(back);
    assert_string_equal(text, again);
    assert_non_null(strstr(text, "expert_shard_degree: auto\n"));
    assert_non_null(strstr(text, "time_limit: 2h\n"));
    free(text);
    free(again);
    job_file_free(s);
    job_file_free(back);
}

/* base with sets over it. */
static const struct { const char *shows, *sets[4], *said; } rows[] = {
    {"nothing wrong", {"parallel.workers=4"}, ""},
    {"a degree that does not divide", {"parallel.workers=4", "parallel.fsdp_shard_degree=3"},
     "--set: key 'parallel.fsdp_shard_degree': 3 does not divide the 4 workers, "
     "allowed 1, 2, 4"},
    {"experts too", {"parallel.workers=4", "parallel.expert_parallel_degree=8"},
     "--set: key 'parallel.expert_parallel_degree': 8 does not divide the 4 workers, "
     "allowed 1, 2, 4; or parallel.workers: 8"},
    {"a batch that cannot be cut", {"parallel.workers=4", "train.micro_batch=3"},
     "job.yaml: key 'train.global_batch': 32 is not a multiple of micro_batch x workers = "
     "3 x 4 = 12; the nearest is 24"},
    {"a warm-up as long as the run", {"train.schedule.warmup_steps=300"},
     "--set: key 'train.schedule.warmup_steps': 300 is not less than train.steps (300)"},
    {"a floor above the top", {"train.schedule.min_lr=0.01"},
     "--set: key 'train.schedule.min_lr': 0.01 is above train.optimizer.lr (0.003)"},
    {"text read as numbers", {"data.format=u16"},
     "job.yaml:3: key 'data.train': '/jobs/text/*.txt' is read with data.format bytes, not u16"},
    {"numbers read as text", {"data.train=[a.bin]"},
     "--set: key 'data.train': '/jobs/a.bin' is read with data.format u16 or u32, not bytes"},
    {"an indexer beside what rests", {"train.indexer.with_model=true", "train.mode=indexer"},
     "--set: key 'train.indexer.with_model': true goes with train.mode full or lora, not "
     "indexer"},
    {"half of an indexed dataset", {"data.train=[a.idx]"},
     "--set: key 'data.train': '/jobs/a.idx' is half of a Megatron dataset, which is named by its "
     "prefix without .idx and .bin, with data.format megatron"},
    {"its other half", {"data.train=[a.bin]", "data.format=megatron"},
     "--set: key 'data.train': '/jobs/a.bin' is half of a Megatron dataset, which is named by its "
     "prefix without .idx and .bin, with data.format megatron"},
    {"adapters without a target", {"train.mode=lora", "train.lora.targets=[]"},
     "--set: key 'train.lora.targets': is empty; expected ends of module paths, as in "
     "[q_proj, o_proj, experts]"},
    {"one A for experts that may move", {"train.mode=lora", "train.deterministic=true",
                                         "train.lora.shared_a=true"},
     "--set: key 'train.lora.shared_a': the sum over the experts of a rank changes bits when they "
     "move, which train.deterministic excludes; expected false"},
    {"not yet: sequence parallel", {"parallel.workers=4", "parallel.sequence_parallel_degree=2"},
     "--set: key 'parallel.sequence_parallel_degree': 2 is not supported yet; this version runs 1"},
    {"not yet: offload", {"parallel.offload=optimizer"},
     "--set: key 'parallel.offload': optimizer is not supported yet; this version runs off"},
    {"unknown optimizer", {"train.optimizer.name=sgd"},
     "--set: key 'train.optimizer.name': 'sgd' is not allowed; "
     "allowed: adamw, muon, muon_per_head"},
    {"a limit of no time", {"scheduling.time_limit=0.4s"},
     "--set: key 'scheduling.time_limit': 0.4s is out of range, allowed none or 1s to 3650d"},
    {"a cut into nothing", {"parallel.expert_shard_degree=0"},
     "--set: key 'parallel.expert_shard_degree': 0 is out of range, allowed auto or 1 to 8192"},
    {"segments with nothing made again", {"parallel.segment_tokens=4096"},
     "--set: key 'parallel.segment_tokens': goes with parallel.activation_checkpointing: full, "
     "not off"},
    {"segments that cut blocks",
     {"parallel.segment_tokens=100", "parallel.activation_checkpointing=full"},
     "--set: key 'parallel.segment_tokens': 100 is not a multiple of 64; the nearest is 128"},
    {"segments of what is a loss each",
     {"parallel.segment_tokens=64", "parallel.activation_checkpointing=full", "moe.aux_loss=0.1",
      "moe.aux_scope=sequence"},
     "--set: key 'parallel.segment_tokens': cuts documents, of which moe.aux_scope: sequence is; "
     "expected global or micro_batch there"},
    {"no training data", {"data.train=[]"},
     "--set: key 'data.train': has 0 of at least 1 elements"},
    {"older spellings",
     {"parallel.sequence_parallel=true", "parallel.activation_checkpointing=true"}, ""},
};

static void what_keys_mean_together_is_checked(void **state)
{
    (void)state;
    char dir[] = "/tmp/test_job_file.XXXXXX";
    assert_non_null(mkdtemp(dir));
    assert_int_equal(chdir(dir), 0);
    FILE *out = fopen("job.yaml", "w");
    fputs(base, out);
    fclose(out);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t n = 0;
        while (n < 4 && rows[i].sets[n])
            n++;
        Ballast__JobSpec *spec = NULL;
        struct problems p = {0};
        struct job_file_places places = {0};
        job_file_read("job.yaml", rows[i].sets, n, &spec, &places, &p);
        char *said = problems_text(&p), *at = strstr(said, dir);
        if (at) { /* the folder differs from run to run */
            memcpy(at, "/jobs", 5);
            memmove(at + 5, at + strlen(dir), strlen(at + strlen(dir)) + 1);
        }
        if (strcmp(said, rows[i].said) != 0)
            fail_msg("%s:\n  said     %s\n  expected %s", rows[i].shows, said, rows[i].said);
        if (!strcmp(rows[i].shows, "older spellings")) {
            assert_string_equal(job_file_place(&places, "model.path"), "job.yaml:2");
            assert_string_equal(job_file_place(&places, "data.pack"), "job.yaml");
            assert_string_equal(job_file_place(&places, "parallel.activation_checkpointing"),
                                "--set");
            assert_int_equal(spec->parallel_sequence_parallel_degree, 1);
            assert_string_equal(spec->parallel_activation_checkpointing, "full");
        }
        assert_int_equal(spec == NULL, *rows[i].said != '\0');
        free(said);
        problems_fini(&p);
        job_file_places_fini(&places);
        job_file_free(spec);
    }
    unlink("job.yaml");
    assert_int_equal(chdir("/"), 0);
    rmdir(dir);
}

static void the_committed_page_is_the_tables(void **state)
{
    (void)state;
    const char *source = getenv("BALLAST_SOURCE");
    char *path = xasprintf("%s/docs/job-file.md", source ? source : ".");
    FILE *in = fopen(path, "r");
    if (!in)
        fail_msg("%s is missing: ballast submit --explain > docs/job-file.md", path);
    char *page = job_file_explain(), *committed = xcalloc(1, strlen(page) + 2);
    size_t n = fread(committed, 1, strlen(page) + 1, in);
    fclose(in);
    if (n != strlen(page) || memcmp(page, committed, n) != 0)
        fail_msg("%s is older than the table: ballast submit --explain > docs/job-file.md", path);
    free(page);
    free(committed);
    free(path);
}

/* Degrees that are right one by one, but not together, are no help. */
static void whole_layouts_are_told(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        uint32_t workers, fsdp, ep, shard, batch, n_experts;
        const char *said;
    } layouts[] = {
        {"all fit", 6, 3, 2, 3, 12, 16, ""},
        {"nothing is known of the experts", 6, 1, 4, 0, 24, JOB_EXPERTS_UNKNOWN,
         "key 'parallel.expert_parallel_degree': 4 does not divide the 6 workers, allowed 1, 2, 3, "
         "6; or parallel.workers: 4 or 8"},
        {"6 divides the workers, but no 16 experts", 6, 1, 4, 0, 24, 16,
         "key 'parallel.expert_parallel_degree': 4 does not divide the 6 workers and the model's "
         "16 experts, allowed 1, 2; or parallel.workers: 4 or 8"},
        {"no number of workers helps where experts do not divide", 6, 1, 3, 0, 24, 16,
         "key 'parallel.expert_parallel_degree': 3 does not divide the 6 workers and the model's "
         "16 experts, allowed 1, 2"},
        {"8 workers cannot share the batch", 6, 1, 4, 0, 12, 16,
         "key 'parallel.expert_parallel_degree': 4 does not divide the 6 workers and the model's "
         "16 experts, allowed 1, 2; or parallel.workers: 4 or 12"},
        {"two that are wrong", 6, 4, 4, 0, 24, 16,
         "key 'parallel.fsdp_shard_degree': 4 does not divide the 6 workers, allowed 1, 2, 3, 6\n"
         "key 'parallel.expert_parallel_degree': 4 does not divide the 6 workers and the model's "
         "16 experts, allowed 1, 2; together: fsdp_shard_degree 3, expert_parallel_degree 2; or "
         "parallel.workers: 4 or 8"},
        {"a shard degree follows the expert degree", 12, 1, 8, 2, 48, 16,
         "key 'parallel.expert_parallel_degree': 8 does not divide the 12 workers and the model's "
         "16 experts, allowed 1, 2, 4; together: expert_parallel_degree 4, expert_shard_degree 1; "
         "or parallel.workers: 16"},
        {"one worker for each expert", 4, 1, 4, 2, 8, 16,
         "key 'parallel.expert_shard_degree': 2 does not divide the 1 worker that holds an expert, "
         "allowed 1; or parallel.workers: 8"},
        {"a dense model", 4, 1, 2, 0, 8, 0,
         "key 'parallel.expert_parallel_degree': 2, but the model has no experts, allowed 1"},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
        struct problems p = {0};
        spec.parallel_workers = layouts[i].workers;
        spec.parallel_fsdp_shard_degree = layouts[i].fsdp;
        spec.parallel_expert_parallel_degree = layouts[i].ep;
        spec.parallel_expert_shard_degree = layouts[i].shard;
        spec.train_global_batch = layouts[i].batch;
        spec.train_micro_batch = 1;
        job_degrees_check(&spec, layouts[i].n_experts, &p);
        char *said = problems_text(&p);
        if (strcmp(said, layouts[i].said) != 0)
            fail_msg("%s:\n  said     %s\n  expected %s", layouts[i].shows, said,
                     layouts[i].said);
        free(said);
        problems_fini(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_whole_example_is_read),
        cmocka_unit_test(defaults_make_a_job),
        cmocka_unit_test(it_survives_the_wire_and_protobufs_own_free),
        cmocka_unit_test(a_spec_by_wire_meets_the_same_limits),
        cmocka_unit_test(what_is_written_reads_back),
        cmocka_unit_test(the_committed_page_is_the_tables),
        cmocka_unit_test(what_keys_mean_together_is_checked),
        cmocka_unit_test(whole_layouts_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
