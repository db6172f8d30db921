/* test_ctl.c - the client as people meet it */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <signal.h>
#include <time.h>

#include "tests/a_coordinator.h"

/* ---- what it is told ------------------------------------------------------------------------- */

static Ballast__Job job(Ballast__JobState state, const char *reason)
{
    static char *names[] = {"w0", "w1"};
    Ballast__Job j = BALLAST__JOB__INIT;
    j.id = 7;
    j.name = "tiny";
    j.user = "ada";
    j.state = state;
    j.reason = (char *)reason;
    j.gang_size = 2;
    j.attempt = 1;
    j.step = 1;
    j.steps = 2;
    j.loss = 2.5;
    j.validation_loss = j.imbalance = NAN;
    j.submitted_at_ns = 1764424193123000000;
    j.started_at_ns = j.submitted_at_ns + 1000000000;
    j.n_workers = 2;
    j.workers = names;
    return j;
}

static void write_file(const char *name, const char *text)
{
    char *path = xasprintf("%s/%s", fake.folder, name);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    fputs(text, out);
    fclose(out);
    free(path);
}

static const char job_text[] =
    "name: tiny\nmodel: {path: model}\ndata: {train: [a.txt]}\ntrain: {steps: 2}\n"
    "parallel: {workers: 2}\ncheckpoint: {path: ck}\n";

/* A model small enough to read here. */
static const char config_text[] =
    "{\"architectures\": [\"KimiK3ForConditionalGeneration\"], \"model_type\": \"kimi_k3\","
    "\"text_config\": {\"model_type\": \"kimi_linear\", \"vocab_size\": 256, \"hidden_size\": 32,"
    "\"num_hidden_layers\": 4, \"intermediate_size\": 64, \"num_attention_heads\": 2,"
    "\"num_key_value_heads\": 2, \"kv_lora_rank\": 16, \"q_lora_rank\": 16,"
    "\"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8, \"v_head_dim\": 16,"
    "\"mla_use_nope\": true, \"mla_use_output_gate\": true, \"linear_attn_config\":"
    "{\"kda_layers\": [1, 2, 3], \"full_attn_layers\": [4], \"head_dim\": 16, \"num_heads\": 2,"
    "\"short_conv_kernel_size\": 4, \"gate_lower_bound\": -5.0, \"use_full_rank_gate\": true},"
    "\"first_k_dense_replace\": 1, \"moe_layer_freq\": 1, \"num_experts\": 8,"
    "\"num_experts_per_token\": 2, \"num_shared_experts\": 1, \"moe_intermediate_size\": 16,"
    "\"routed_expert_hidden_size\": 16, \"latent_moe_use_norm\": true,"
    "\"moe_renormalize\": true, \"moe_router_activation_func\": \"sigmoid\","
    "\"routed_scaling_factor\": 1.0, \"num_expert_group\": 1, \"topk_group\": 1,"
    "\"topk_method\": \"noaux_tc\", \"use_grouped_topk\": true, \"attn_res_block_size\": 2,"
    "\"hidden_act\": \"situ\", \"activation_situ_beta\": 4.0,"
    "\"activation_situ_linear_beta\": 25.0, \"initializer_range\": 0.02,"
    "\"rms_norm_eps\": 1e-5, \"tie_word_embeddings\": false}}";

static void write_job(void)
{
    char *model = xasprintf("%s/model", fake.folder), *config = xasprintf("%s/config.json", model);
    mkdir(model, 0755);
    write_file("model/config.json", config_text);
    write_file("job.yaml", job_text);
    write_file("a.txt", "text");
    free(model);
    free(config);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void every_command_has_help(void **state)
{
    (void)state;
    static const char *const commands[] = {
        "submit", "jobs", "job show", "job cancel", "job hold", "job release", "job requeue",
        "job pause", "job resume",
        "job set",
        "wait", "logs", "events", "metrics", "workers", "worker drain", "worker resume", "ping",
        "doctor", "version", "experts", "placement", "rebalance plan", "rebalance apply",
        "rebalance history", "rebalance auto", "db query", "db backup", "top", "balance",
        "queue", "cancel", "data", "nodes", "node drain", "node resume", "config show",
        "config contexts", "completion", "help",
    };
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char *line = xasprintf("%s --help", commands[i]);
        char *usage = xasprintf("Usage: ballast %s", commands[i]);
        check(line, 0, usage, "");
        char *example = xasprintf("  ballast %s", commands[i]);
        check(line, 0, example, "");
        free(line);
        free(usage);
        free(example);
    }
    check("submit --help", 0, "change a key of the job file; may be repeated\n", "");
    check("jobs --help", 0, "all must hold; may be repeated\n", "");
    check("--help", 0, "Exit codes:", "");
    check("--version", 0, "commit", "");
    check("--check-config", 0, "(from BALLAST_ADDRESS)", "");
    check("--check-config --address tcp://8.8.8.8:1", 2, "", "(from --address)");
    check("version --json", 0, "\"sqlite\"", "");
}

static void mistakes_on_the_command_line_are_one_line(void **state)
{
    (void)state;
    static const struct { const char *line, *err; } rows[] = {
        {"jbos", "'jbos' is not a command; did you mean 'ballast jobs'?"},
        {"job shwo 3", "did you mean 'ballast job show'?"},
        {"frobnicate", "'frobnicate' is not a command; 'ballast --help' lists them"},
        {"rebalance", "'rebalance' alone is not a command; what follows it is one of plan, apply, "
                      "history, auto"},
        {"db", "'db' alone is not a command; what follows it is one of query, backup"},
        {"jobs --jsn", "unknown option '--jsn'; did you mean '--json'?"},
        {"jobs --plot", "--plot does not belong to 'jobs'"},
        {"jobs -o xml", "--output: 'xml' is not a column of jobs; expected wide, json, yaml, "
                        "name, or of these: jobid, "},
        {"job show", "missing arguments; usage: ballast job show ID"},
        {"job show 1 2", "too many arguments"},
        {"job show seven", "'seven' is not a job id"},
        {"job show 0", "'0' is not a job id"},
        {"job show -- -1", "'-1' is not a job id"},
        {"wait 7 --for=state=RUNING", "'state=RUNING' is not state=STATE"},
        {"wait 7 --timeout soon", "--timeout: 'soon' is not a duration"},
        {"ping --address tcp://8.8.8.8:1", "tcp://8.8.8.8:1"},
        {"logs 7 --rank x", "--rank: 'x' is not a whole number"},
        {"metrics 7 --plot --csv", "exclude each other"},
        {"submit", "missing arguments"},
        {"jobs -c 5 --count 6", "--count is given twice; expected one value"},
        {"logs 7 --rank 1 --rank 1", "--rank is given twice; expected one value"},
        {"jobs --timeout 5 -t bad", "--timeout: 'bad' is not a duration"}, /* the last one counts */
        {"jobs --json -o name", "--json and --output are given; expected one of them"},
        {"jobs --me -u ada", "--me and --user are given"},
        {"jobs --me -A", "contradict each other"},
        {"submit job.yaml --cluster none.yaml", "--cluster goes with --dry-run"},
        {"submit job.yaml --dry-run --follow", "--follow does not go with --dry-run"},
        {"job set 7", "missing arguments; usage: ballast job set ID KEY=VALUE..."},
        {"job set 7 train.steps=5", "key 'train.steps' cannot be changed while a job lives"},
        {"job set 7 rebalance.auto=false", "'ballast rebalance auto on|off ID' does"},
        {"job set 7 checkpoint.keep=none", "key 'checkpoint.keep': "},
    };
    fake_forget();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check(rows[i].line, 2, "", rows[i].err);
    assert_int_equal(n_all_requests(), 0);
}

static void exit_codes_follow_the_status(void **state)
{
    (void)state;
    static const struct { Ballast__Code code; const char *reason; int exit; } rows[] = {
        {BALLAST__CODE__NOT_FOUND, "NO_JOB", 3},
        {BALLAST__CODE__PERMISSION_DENIED, "NOT_YOURS", 4},
        {BALLAST__CODE__UNAUTHENTICATED, "KEY", 4},
        {BALLAST__CODE__FAILED_PRECONDITION, "NOT_HELD", 5},
        {BALLAST__CODE__ABORTED, "MOVED", 5},
        {BALLAST__CODE__ALREADY_EXISTS, "KEY_REUSED", 5},
        {BALLAST__CODE__RESOURCE_EXHAUSTED, "QUEUE_FULL", 6},
        {BALLAST__CODE__UNIMPLEMENTED, "METHOD", 9},
        {BALLAST__CODE__FAILED_PRECONDITION, "VERSION", 9},
        {BALLAST__CODE__INVALID_ARGUMENT, "BAD_FIELD", 2},
        {BALLAST__CODE__INTERNAL, "BUG", 1},
        {BALLAST__CODE__DATA_LOSS, "READ_ONLY", 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fake_forget();
        will_refuse(BALLAST__METHOD__METHOD_JOB_SHOW, rows[i].code, rows[i].reason,
                    "the one line");
        check("job show 7", rows[i].exit, "", "ballast: the one line\n");
    }
    check("job cancel 7 --address ipc:///no/such --timeout 1", 7, "",
          "ballast: reconnecting to ipc:///no/such (no coordinator answers there)\n"
          "ballast: no coordinator answers at ipc:///no/such; is it running?"); /* never sent */
    struct result r = run("job show 7 --json");
    struct json *v;
    struct err err;
    assert_int_equal(r.code, 1);
    assert_string_equal(r.out, "");
    assert_int_equal(json_parse(r.err, strlen(r.err), 1 << 20, &v, &err), 0);
    assert_string_equal(json_as_string(json_get(v, "code")), "DATA_LOSS");
    assert_string_equal(json_as_string(json_get(v, "reason")), "READ_ONLY");
    json_destroy(v);
    result_fini(&r);
    check("ping --timeout 0.5 --address ipc:///tmp/nobody-here.sock", 7, "", "no coordinator");
}

static void jobs_are_listed_in_every_form(void **state)
{
    (void)state;
    Ballast__Job a = job(BALLAST__JOB_STATE__JOB_RUNNING, "");
    Ballast__Job b = job(BALLAST__JOB_STATE__JOB_QUEUED, "needs 2 workers, 1 free");
    Ballast__Job *jobs[] = {&a, &b};
    Ballast__JobListReply reply = BALLAST__JOB_LIST_REPLY__INIT;
    reply.n_jobs = 2;
    reply.jobs = jobs;
    reply.seq = 41;
    b.id = 8;
    b.loss = NAN;
    b.started_at_ns = 0;
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_JOB_LIST, &reply.base);
    check("jobs", 0, "JOBID  NAME  USER  ST  WORKERS  STEP", "");
    check("jobs", 0, "    7  tiny  ada   R         2   1/2  2.5000", "");
    check("jobs", 0, "(needs 2 workers, 1 free)\n", "");
    check("jobs -o wide --no-header", 0, "2025-11-29T13:49:53.123Z", "");
    check("jobs -o name", 0, "7\n8\n", "");
    check("jobs -o yaml", 0, "    state: \"QUEUED\"\n", "");
    struct json *v = run_json("jobs --json");
    const struct json *first = json_at(json_get(v, "items"), 0);
    assert_string_equal(json_as_string(json_get(v, "kind")), "JobList");
    assert_string_equal(json_as_string(json_get(first, "id")), "7");
    assert_string_equal(json_as_string(json_get(first, "state")), "RUNNING");
    assert_string_equal(json_as_string(json_get(first, "submitted_at")),
                        "2025-11-29T13:49:53.123Z");
    assert_int_equal(json_kind_of(json_get(first, "imbalance")), JSON_NULL);
    assert_int_equal(json_count(json_get(first, "worker_names")), 2);
    json_destroy(v);
    reply.n_jobs = 0;
    check("jobs", 0, "JOBID", "no job is queued or running");
    check("jobs -q --no-header", 0, "", "");
    reply.n_jobs = 2;
    b.reason = "\x1b]0;title\x07"; /* must not reach the terminal */
    check("jobs", 9, "", "without control characters");
}

static void one_job_is_shown_with_its_file(void **state)
{
    (void)state;
    Ballast__Job j = job(BALLAST__JOB_STATE__JOB_RUNNING, "");
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__Event e = BALLAST__EVENT__INIT, *events[] = {&e};
    Ballast__JobShowReply reply = BALLAST__JOB_SHOW_REPLY__INIT;
    spec.name = "tiny";
    spec.train_steps = 2;
    e.seq = 3;
    e.kind = "JOB_ASSIGNED";
    e.text = "attempt 1 on w0 w1";
    e.at_ns = j.submitted_at_ns;
    reply.job = &j;
    reply.spec = &spec;
    reply.events = events;
    reply.n_events = 1;
    /* Three steps of a job of 300, of which one is another attempt's: 200 steps of 9 s are left. */
    Ballast__StepReport s[3], *steps[] = {&s[0], &s[1], &s[2]};
    Ballast__MetricsReply metrics = BALLAST__METRICS_REPLY__INIT;
    j.step = 100;
    j.steps = 300;
    j.attempt = 2;
    for (int i = 0; i < 3; i++) {
        s[i] = (Ballast__StepReport)BALLAST__STEP_REPORT__INIT;
        s[i].step = 98 + (uint64_t)i;
        s[i].at_ns = (int64_t)(i * 9 * NS_PER_S);
        s[i].attempt = i ? 2 : 1;
    }
    metrics.steps = steps;
    metrics.n_steps = 3;
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_JOB_SHOW, &reply.base);
    will_say(BALLAST__METHOD__METHOD_METRICS, &metrics.base);
    check("job show 7", 0, "state            RUNNING\n", "");
    check("job show 7", 0, "left             00:30:00, until about ", "");
    check("job show 7", 0, "  steps: 2\n", "");
    check("job show 7", 0, "JOB_ASSIGNED        attempt 1 on w0 w1\n", "");
    struct json *v = run_json("job show 7 --json");
    uint64_t n_steps = 0, left = 0;
    assert_string_equal(json_as_string(json_get(v, "state")), "RUNNING");
    assert_true(json_as_u64(json_get(json_get(json_get(v, "spec"), "train"), "steps"), &n_steps));
    assert_int_equal(n_steps, 2);
    assert_true(json_as_u64(json_get(v, "seconds_left"), &left) && left == 1800);
    assert_int_equal(json_kind_of(json_get(json_get(json_get(json_get(v, "spec"), "train"),
                                                    "optimizer"), "betas")), JSON_ARRAY);
    json_destroy(v);
}

static void waiting_mirrors_the_job(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        Ballast__JobState state;
        const char *exit, *line;
        int code;
        bool reached;
    } rows[] = {
        {"done", BALLAST__JOB_STATE__JOB_DONE, "0", "wait 7", 0},
        {"failed", BALLAST__JOB_STATE__JOB_FAILED, "1", "wait 7", 1},
        {"killed", BALLAST__JOB_STATE__JOB_FAILED, "0:9", "wait 7", 137},
        {"cancelled", BALLAST__JOB_STATE__JOB_CANCELLED, "", "wait 7", 1},
        {"reached", BALLAST__JOB_STATE__JOB_RUNNING, "", "wait 7 --for=state=RUNNING", 0},
        {"passed", BALLAST__JOB_STATE__JOB_DONE, "0", "wait 7 --for=state=RUNNING", 0},
        {"will not be", BALLAST__JOB_STATE__JOB_FAILED, "1", "wait 7 --for=state=DONE", 1},
        {"asked for", BALLAST__JOB_STATE__JOB_FAILED, "1", "wait 7 --for state=failed", 0},
        {"paused", BALLAST__JOB_STATE__JOB_PAUSED, "", "wait 7 --for=state=paused", 0},
        {"never", BALLAST__JOB_STATE__JOB_DONE, "0", "wait 7 --for=state=PAUSED", 1},
        {"on", BALLAST__JOB_STATE__JOB_RUNNING, "", "wait 7 --for=state=STARTING", 0, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Ballast__Job j = job(rows[i].state, "because");
        Ballast__JobReply reply = BALLAST__JOB_REPLY__INIT;
        j.exit = (char *)rows[i].exit;
        reply.job = &j;
        reply.reached = rows[i].reached;
        fake_forget();
        will_say(BALLAST__METHOD__METHOD_JOB_WAIT, &reply.base);
        struct result r = run(rows[i].line);
        if (r.code != rows[i].code)
            fail_msg("%s: exit %d instead of %d: %s", rows[i].shows, r.code, rows[i].code, r.err);
        result_fini(&r);
        fake_forget();
    }
    Ballast__Job waits = job(BALLAST__JOB_STATE__JOB_QUEUED, "because");
    Ballast__JobReply reply = BALLAST__JOB_REPLY__INIT;
    reply.job = &waits;
    will_say(BALLAST__METHOD__METHOD_JOB_WAIT, &reply.base);
    check_gives_up("wait 7", 0.3, 124, NULL);
    fake_forget();
}

static void wrong_job_files_contact_nobody(void **state)
{
    (void)state;
    static const struct { const char *text, *err; } rows[] = {
        {"name: tiny\nmodel: {path: model}\ndata: {train: [a.txt]}\ntrian: {steps: 2}\n"
         "checkpoint: {path: ck}\n",
         "bad.yaml:4: key 'trian': unknown; did you mean 'train'?"},
        {"name: tiny\nmodel: {path: model}\ndata: {train: [a.txt]}\ntrain: {steps: 0}\n"
         "checkpoint: {path: ck}\n",
         "bad.yaml:4: key 'train.steps': 0 is out of range, allowed 1 to 1e9\n"},
        {"name: tiny\nmodel: {path: none}\ndata: {train: [a.txt]}\ntrain: {steps: 2}\n"
         "checkpoint: {path: ck}\n",
         "bad.yaml:2: key 'model.path': "},
        {"", "bad.yaml: the file is empty\n"},
    };
    write_job();
    fake_forget();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        write_file("bad.yaml", rows[i].text);
        check("submit bad.yaml", 2, "", rows[i].err);
        check("submit bad.yaml --dry-run", 2, "", rows[i].err);
    }
    check("submit bad.yaml --json --set train.steps=0", 2, "", "\"field\":\"train.steps\"");
    check("submit nowhere.yaml", 2, "", "nowhere.yaml: No such file or directory\n");
    check("submit job.yaml --set train.steps=x", 2, "",
          "--set: key 'train.steps': 'x' is not a whole number, allowed 1 to 1e9\n");
    check("submit job.yaml --set parallel.workers=3", 2, "", "is not a multiple of");
    check("submit job.yaml --set parallel.workers=3 --set parallel.expert_parallel_degree=3 "
          "--set train.global_batch=33", 2, "",
          "--set: key 'parallel.expert_parallel_degree': 3 does not divide the 3 workers "
          "and the model's 8 experts, allowed 1\n");
    check("submit job.yaml --dry-run", 0, "MEMORY PER RANK", "nothing was submitted");
    check("submit job.yaml --dry-run", 0, "EXPERTS OF A LAYER", NULL);
    check("submit job.yaml --dry-run --cluster nowhere.yaml", 2, "", "nowhere.yaml");
    check("submit job.yaml --dry-run --set data.train=[none/*.txt]", 0, "MEMORY PER RANK",
          "/none/*.txt'; the workers look for their own");
    check("submit job.yaml --dry-run --set train.mode=lora", 0, "MEMORY PER RANK",
          "holds no weights");
    check("submit job.yaml --dry-run --set parallel.tensor_parallel_degree=2", 2, "",
          "key 'parallel.tensor_parallel_degree': 2 is not supported yet; this version runs 1\n");
    check("submit job.yaml --dry-run --set parallel.sequence_parallel_degree=4", 2, "",
          "key 'parallel.sequence_parallel_degree': 4 is not supported yet; this version runs 1\n");
    check("submit job.yaml --dry-run --set parallel.workers=4 --set train.global_batch=64 "
          "--set parallel.fsdp_shard_degree=3", 2, "",
          "key 'parallel.fsdp_shard_degree': 3 does not divide the 4 workers, allowed 1, 2, 4\n");
    check("submit job.yaml --dry-run --set parallel.workers=1024 --set train.global_batch=4096 "
          "--set parallel.fsdp_shard_degree=100", 2, "",
          "100 does not divide the 1024 workers, allowed ..., 64, 128, ...\n");
    check("submit job.yaml --dry-run --set parallel.workers=4 --set train.global_batch=64 "
          "--set parallel.expert_parallel_degree=2 --set parallel.expert_shard_degree=4", 2, "",
          "4 does not divide the 2 workers that hold the same experts, allowed 1, 2; or "
          "parallel.workers: 8\n");
    write_file("small.yaml", "name: small\ngpu_memory: 2MB\n");
    check("submit job.yaml --dry-run --cluster small.yaml", 6,
          "which a GPU of small does not have; into its 1.91 MiB ", "nothing was submitted");
    check("submit job.yaml --dry-run --set data.sequence_length=2", 0,
          "data.train       1 file, 1 document, 4 tokens\n"
          "                 1 sequence an epoch; ",
          "data.train: 1 sequence does not fill one step of train.global_batch ");
    check("submit job.yaml --dry-run", 0, "data.train       not counted on this machine\n",
          "data.train: 4 tokens are too few: one sequence needs ");
    struct json *v = run_json("submit job.yaml --dry-run --json");
    assert_int_equal(json_count(json_get(json_get(v, "data"), "warnings")), 1);
    bool fits = false;
    assert_non_null(json_get(json_get(v, "memory_per_rank"), "total"));
    assert_true(json_as_bool(json_get(v, "fits"), &fits) && fits);
    const struct json *rank = json_at(json_get(v, "ranks"), 0);
    uint64_t n_slices = 0;
    assert_true(json_as_u64(json_get(json_get(rank, "dense"), "of"), &n_slices) && n_slices > 0);
    assert_non_null(json_get(json_get(v, "time_of_a_step"), "total_s"));
    json_destroy(v);
    /* A wait that a test before this one gave up may come late. */
    assert_int_equal(n_all_requests(), n_requests(BALLAST__METHOD__METHOD_JOB_WAIT));
}

static void a_submit_prints_the_id_and_what_next(void **state)
{
    (void)state;
    Ballast__SubmitReply reply = BALLAST__SUBMIT_REPLY__INIT;
    reply.job_id = 7;
    write_job();
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_SUBMIT, &reply.base);
    struct result r = run("submit job.yaml");
    assert_int_equal(r.code, 0);
    assert_string_equal(r.out, "7\n");
    assert_string_equal(r.err, "  ballast metrics 7 -f\n  ballast logs 7 -f\n");
    result_fini(&r);
    struct json *v = run_json("submit job.yaml --json");
    assert_string_equal(json_as_string(json_get(v, "id")), "7");
    json_destroy(v);
    check("submit job.yaml --hold", 0, "7\n", "  ballast job release 7\n");
    Ballast__SubmitRequest *sent = (Ballast__SubmitRequest *)last_request(
        BALLAST__METHOD__METHOD_SUBMIT, &ballast__submit_request__descriptor);
    assert_true(sent->hold);
    ballast__submit_request__free_unpacked(sent, NULL);
    fake_forget();
    will_refuse(BALLAST__METHOD__METHOD_SUBMIT, BALLAST__CODE__RESOURCE_EXHAUSTED, "NO_FIT",
                "needs 3 GiB per rank");
    check("submit job.yaml", 6, "", "needs 3 GiB per rank");
}

static void a_lost_answer_is_asked_for_with_the_same_key(void **state)
{
    (void)state;
    Ballast__SubmitReply reply = BALLAST__SUBMIT_REPLY__INIT;
    reply.job_id = 7;
    write_job();
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_SUBMIT, &reply.base);
    will_drop(1);
    check("submit job.yaml --timeout 20", 0, "7\n", NULL);
    assert_true(came_twice());
    fake_forget();
    will_drop(100);
    check_gives_up("submit job.yaml", 1, 8, "it may have been done");
    fake_forget();
}

static Ballast__LogsReply a_log(const char *text, Ballast__LogTime **times)
{
    Ballast__LogsReply r = BALLAST__LOGS_REPLY__INIT;
    r.bytes = (ProtobufCBinaryData){strlen(text), (uint8_t *)text};
    r.next_offset = strlen(text);
    r.times = times;
    r.n_times = times ? 2 : 0;
    r.ended = true;
    r.n_ranks = 2;
    return r;
}

static void all_ranks_are_merged_by_time(void **state)
{
    (void)state;
    Ballast__LogTime t[4], *first[] = {&t[0], &t[1]}, *second[] = {&t[2], &t[3]};
    for (int i = 0; i < 4; i++)
        t[i] = (Ballast__LogTime)BALLAST__LOG_TIME__INIT;
    t[0].at_ns = 10;
    t[1] = (Ballast__LogTime){t[0].base, 4, 30}; /* from "c" on */
    t[2].at_ns = 20;
    t[3] = (Ballast__LogTime){t[0].base, 2, 40};
    /* In turn: how many ranks there are, what rank 0 printed, what rank 1 did. */
    Ballast__LogsReply zero = a_log("a\na\nc\x1b\nd", first), one = a_log("b\ne\n", second);
    static const struct { const char *line, *out; } rows[] = {
        {"logs 7 --rank all -q", "0: a\n0: a\n1: b\n0: c\\x1b\n1: e\n0: d\n"},
        {"logs 7 --rank all -f", "0: a\n0: a\n1: b\n0: c\\x1b\n1: e\n0: d\n"},
        {"logs 7 --rank all --json", "{\"rank\":0,\"line\":\"a\"}\n{\"rank\":0,\"line\":\"a\"}\n"
         "{\"rank\":1,\"line\":\"b\"}\n"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fake_forget();
        will_say_in_turn(BALLAST__METHOD__METHOD_LOGS, &zero.base, 2, &one.base);
        check(rows[i].line, 0, rows[i].out, "");
    }
    assert_int_equal(n_requests(BALLAST__METHOD__METHOD_LOGS), 3);
}

static void streams_are_printed_safely(void **state)
{
    (void)state;
    Ballast__LogsReply logs = BALLAST__LOGS_REPLY__INIT, end = BALLAST__LOGS_REPLY__INIT;
    static const char text[] = "step 1\n\x1b[31mred\r\n\xc3\xa9 \xff \xe2\x80\xae\n";
    logs.bytes = (ProtobufCBinaryData){sizeof text - 1, (uint8_t *)text};
    logs.next_offset = sizeof text - 1;
    end.next_offset = logs.next_offset;
    end.ended = logs.ended = true;
    end.n_ranks = logs.n_ranks = 2;
    fake_forget();
    will_say_then(BALLAST__METHOD__METHOD_LOGS, &logs.base, &end.base);
    check("logs 7", 0, "step 1\n\\x1b[31mred\\x0d\n\xc3\xa9 \\xff \\xe2\\x80\\xae\n", "");
    will_say_then(BALLAST__METHOD__METHOD_LOGS, &logs.base, &end.base);
    check("logs 7 -f --json", 0, "{\"rank\":0,\"line\":\"step 1\"}\n", "");
    check("logs 7 --rank 2", 3, "", "job 7 has ranks 0 to 1");
    will_refuse(BALLAST__METHOD__METHOD_LOGS, BALLAST__CODE__NOT_FOUND, "NO_JOB", "no job 7");
    check("logs 7", 3, "", "no job 7");

    Ballast__Event e = BALLAST__EVENT__INIT, *events[] = {&e};
    Ballast__EventsReply reply = BALLAST__EVENTS_REPLY__INIT;
    e.seq = 3;
    e.job_id = 7;
    e.kind = "JOB_STATE";
    e.text = "RUNNING";
    reply.events = events;
    reply.n_events = 1;
    reply.next_seq = 4;
    will_say(BALLAST__METHOD__METHOD_EVENTS, &reply.base);
    check("events", 0, "  job 7       JOB_STATE           RUNNING\n", "");
    struct json *v = run_json("events --job 7 --json");
    assert_int_equal(json_count(json_get(v, "items")), 1);
    json_destroy(v);
}

static void steps_then_none(const ProtobufCMessage *steps, const ProtobufCMessage *no_more)
{
    will_say_then(BALLAST__METHOD__METHOD_METRICS, steps, no_more);
}

static void steps_are_tables_and_csv_and_json(void **state)
{
    (void)state;
    Ballast__PhaseTime p = BALLAST__PHASE_TIME__INIT, *phases[] = {&p};
    Ballast__StepReport s = BALLAST__STEP_REPORT__INIT, *steps[] = {&s};
    Ballast__MetricsReply reply = BALLAST__METRICS_REPLY__INIT, no_more = reply;
    p.name = "forward";
    p.seconds = 0.25;
    s.step = 1;
    s.loss = 5.5;
    s.validation_loss = s.imbalance = s.z_loss = NAN;
    s.aux_loss = 1.25;
    s.index_loss = 0.5;
    s.attempt = 2;
    s.at_ns = 1764424193123000000;
    s.rerouted = 3;
    s.dropped = 4;
    s.lr = 3e-3;
    s.tokens_per_second = 1000;
    s.memory_bytes = 3u << 20;
    s.samples = 32;
    s.epoch_samples = 20;
    s.phases = phases;
    s.n_phases = 1;
    reply.steps = steps;
    reply.n_steps = 1;
    Ballast__Job j = job(BALLAST__JOB_STATE__JOB_RUNNING, "");
    Ballast__JobReply present = BALLAST__JOB_REPLY__INIT;
    present.job = &j;
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_JOB_WAIT, &present.base);
    steps_then_none(&reply.base, &no_more.base);
    check("metrics 7 -c 1", 0, "       1    5.5000         -", "");
    steps_then_none(&reply.base, &no_more.base);
    check("metrics 7 -c 1 --phases", 0, "forward             250.00  100.0 %", "");
    steps_then_none(&reply.base, &no_more.base);
    check("metrics 7 -c 1 --csv --phases", 0,
          "step,loss,validation_loss,grad_norm,lr,tokens_per_second,mfu,memory_bytes,imbalance,"
          "aux_loss,z_loss,index_loss,rerouted,dropped,skipped,attempt,at,"
          "memory_planned_bytes,samples,epoch,seconds_forward\n"
          "1,5.5,,0,0.003,1000,0,3145728,,1.25,,0.5,3,4,0,2,2025-11-29T13:49:53.123Z,0,32,1.6,"
          "0.25\n",
          "");
    steps_then_none(&reply.base, &no_more.base);
    struct json *v = run_json("metrics 7 -c 1 --json");
    const struct json *first = json_at(json_get(v, "items"), 0);
    double seconds = 0;
    assert_int_equal(json_kind_of(json_get(first, "validation_loss")), JSON_NULL);
    assert_true(json_as_double(json_get(json_get(first, "phases"), "forward"), &seconds));
    assert_true(seconds == 0.25);
    json_destroy(v);
    steps_then_none(&reply.base, &no_more.base);
    if (access("/usr/bin/gnuplot", X_OK) == 0)
        check("metrics 7 -c 1 --plot", 0, "tokens/s", NULL);
    else
        print_message("SKIPPED: --plot, gnuplot is not installed\n");
    search_path = "/nowhere";
    steps_then_none(&reply.base, &no_more.base);
    check("metrics 7 -c 1 --plot", 1, "", "--plot needs gnuplot, which is not installed");
    search_path = NULL;
}

static void following_ends_with_the_job(void **state)
{
    (void)state;
    Ballast__Job j = job(BALLAST__JOB_STATE__JOB_DONE, "all steps done");
    Ballast__SubmitReply submitted = BALLAST__SUBMIT_REPLY__INIT;
    Ballast__JobReply waited = BALLAST__JOB_REPLY__INIT;
    Ballast__StepReport s = BALLAST__STEP_REPORT__INIT, *steps[] = {&s};
    Ballast__MetricsReply metrics = BALLAST__METRICS_REPLY__INIT;
    submitted.job_id = 7;
    j.exit = "0";
    waited.job = &j;
    s.step = 2;
    s.loss = 2.25;
    s.validation_loss = 2.5;
    s.tokens_per_second = 1234;
    s.imbalance = 1.5;
    s.aux_loss = s.z_loss = NAN;
    metrics.steps = steps;
    metrics.n_steps = 1;
    write_job();
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_SUBMIT, &submitted.base);
    will_say(BALLAST__METHOD__METHOD_JOB_WAIT, &waited.base);
    will_say(BALLAST__METHOD__METHOD_METRICS, &metrics.base);
    check("submit job.yaml --follow", 0, "7\n",
          "step 2/2  loss 2.2500  validation 2.5000  1234 tokens/s  imbalance 1.50\n");
    j.state = BALLAST__JOB_STATE__JOB_FAILED;
    j.exit = "1";
    check("submit job.yaml --follow", 1, "7\n", "ballast events --job 7");
    check("submit job.yaml --wait", 1, "7\n", "job 7 is FAILED");
}

static bool has_said(const char *text)
{
    char *path = xasprintf("%s/err", fake.folder), *said = read_back(path);
    bool is_there = strstr(said, text) != NULL;
    free(path);
    free(said);
    return is_there;
}

/* Follows a running job, sends SIGINT n times, and says how it went. */
static struct result interrupt(unsigned n)
{
    pid_t pid = start("submit job.yaml --follow");
    struct timespec moment = {.tv_nsec = 10 * 1000 * 1000};
    uint64_t end_ns = patience_end_ns(10);
    while (!n_requests(BALLAST__METHOD__METHOD_METRICS) && clock_now_ns() < end_ns)
        nanosleep(&moment, NULL);
    kill(pid, SIGINT);
    while (!has_said("detached") && clock_now_ns() < end_ns)
        nanosleep(&moment, NULL);
    if (n > 1)
        kill(pid, SIGINT);
    return finish(pid);
}

static void ctrl_c_detaches_and_twice_cancels(void **state)
{
    (void)state;
    Ballast__Job j = job(BALLAST__JOB_STATE__JOB_RUNNING, "");
    Ballast__SubmitReply submitted = BALLAST__SUBMIT_REPLY__INIT;
    Ballast__JobReply waited = BALLAST__JOB_REPLY__INIT;
    Ballast__MetricsReply metrics = BALLAST__METRICS_REPLY__INIT;
    submitted.job_id = 7;
    waited.job = &j;
    write_job();
    for (unsigned n = 1; n <= 2; n++) {
        fake_forget();
        will_say(BALLAST__METHOD__METHOD_SUBMIT, &submitted.base);
        will_say(BALLAST__METHOD__METHOD_JOB_WAIT, &waited.base);
        will_say(BALLAST__METHOD__METHOD_METRICS, &metrics.base);
        will_say(BALLAST__METHOD__METHOD_JOB_CANCEL, &waited.base);
        struct result r = interrupt(n);
        assert_non_null(strstr(r.err, "detached; job 7 goes on"));
        assert_int_equal(r.code, n == 1 ? 0 : 130);
        assert_int_equal(n_requests(BALLAST__METHOD__METHOD_JOB_CANCEL), n - 1);
        result_fini(&r);
    }
}

static void doctor_names_the_next_command(void **state)
{
    (void)state;
    Ballast__PingReply ping = BALLAST__PING_REPLY__INIT;
    Ballast__Worker w = BALLAST__WORKER__INIT, *workers[] = {&w};
    Ballast__WorkerListReply fleet = BALLAST__WORKER_LIST_REPLY__INIT;
    Ballast__JobListReply jobs = BALLAST__JOB_LIST_REPLY__INIT;
    ping.version = "0.1.0";
    ping.commit = "abc";
    ping.user = "ada";
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_PING, &ping.base);
    will_say(BALLAST__METHOD__METHOD_WORKER_LIST, &fleet.base);
    will_say(BALLAST__METHOD__METHOD_JOB_LIST, &jobs.base);
    check("ping", 0, "is up: version 0.1.0", "");
    check("doctor", 0, "Next: ballast-worker --config FILE", "");
    w.name = "w0";
    w.state = BALLAST__WORKER_STATE__WORKER_LOST;
    w.reason = "silent for 40 s";
    fleet.workers = workers;
    fleet.n_workers = 1;
    check("doctor", 0, "w0 is LOST: silent for 40 s", "");
    check("workers", 0, "LOST", "");
    w.state = BALLAST__WORKER_STATE__WORKER_DRAINED;
    check("doctor", 0, "Next: ballast worker resume w0\n", "");
    w.state = BALLAST__WORKER_STATE__WORKER_IDLE;
    check("doctor", 0, "All is well.", "");
    static const struct {
        Ballast__JobState state;
        bool held;
        const char *next;
    } rows[] = {
        {BALLAST__JOB_STATE__JOB_PAUSED, false, "Next: ballast job resume 7\n"},
        {BALLAST__JOB_STATE__JOB_QUEUED, true, "Next: ballast job release 7\n"},
        {BALLAST__JOB_STATE__JOB_QUEUED, false, "Next: ballast job show 7\n"},
        {BALLAST__JOB_STATE__JOB_RUNNING, false, "Next: ballast job show 7\n"}, /* it warns */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Ballast__Job j = job(rows[i].state, "because"), *one[] = {&j};
        j.held = rows[i].held;
        jobs.jobs = one;
        jobs.n_jobs = 1;
        will_say(BALLAST__METHOD__METHOD_JOB_LIST, &jobs.base);
        check("doctor", 0, rows[i].next, "");
    }
    struct json *v = run_json("doctor --json");
    assert_string_equal(json_as_string(json_get(v, "next")), "ballast job show 7");
    assert_int_equal(json_count(json_get(v, "findings")), 7);
    json_destroy(v);
    check("doctor --address tcp://10.0.0.1:7070", 2, "Next: ballast keygen", "");
    check("doctor --address ipc:///tmp/nobody-here.sock", 7, "does not exist", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_command_has_help),
        cmocka_unit_test(mistakes_on_the_command_line_are_one_line),
        cmocka_unit_test(exit_codes_follow_the_status),
        cmocka_unit_test(jobs_are_listed_in_every_form),
        cmocka_unit_test(one_job_is_shown_with_its_file),
        cmocka_unit_test(waiting_mirrors_the_job),
        cmocka_unit_test(wrong_job_files_contact_nobody),
        cmocka_unit_test(a_submit_prints_the_id_and_what_next),
        cmocka_unit_test(a_lost_answer_is_asked_for_with_the_same_key),
        cmocka_unit_test(streams_are_printed_safely),
        cmocka_unit_test(all_ranks_are_merged_by_time),
        cmocka_unit_test(steps_are_tables_and_csv_and_json),
        cmocka_unit_test(following_ends_with_the_job),
        cmocka_unit_test(ctrl_c_detaches_and_twice_cancels),
        cmocka_unit_test(doctor_names_the_next_command),
    };
    return cmocka_run_group_tests(tests, fake_start, fake_stop);
}
