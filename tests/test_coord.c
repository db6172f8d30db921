/* test_coord.c - the coordinator's core, message by message */
#include "tests/a_core.h"
#include "tests/a_job.h"

#define JOB(x) BALLAST__JOB_STATE__JOB_##x
#define HELD(by) "held by " by "; ballast job release 1 lets it start"

enum { CLIENT = 1, W1 = 11, W2 = 12, OTHER = 13 }; /* connections */

static int setup(void **state)
{
    *state = bench_create();
    return 0;
}

static void restart(struct bench *b)
{
    stop(b);
    start(b);
}

/* Time passes; all that is due happens. */
static void pass(struct bench *b, double seconds)
{
    uint64_t until_ns = b->now_ns + (uint64_t)(seconds * NS_PER_S);
    for (uint64_t due_ns; (due_ns = coord_next_deadline_ns(b->c)) <= until_ns;) {
        b->now_ns = due_ns > b->now_ns ? due_ns : b->now_ns;
        begin(b);
        finish(b);
    }
    b->now_ns = until_ns;
    begin(b);
    finish(b);
}

static void message(struct bench *b, uint64_t peer, Ballast__Method method,
                    const ProtobufCMessage *payload)
{
    message_with(b, peer, method, 7, payload);
}

static Ballast__Code code(const struct bench *b, uint64_t peer, Ballast__Method method)
{
    const struct outgoing *o = sent(b, peer, method);
    assert_non_null(o);
    return o->envelope.status->code;
}

static void hello_with(struct bench *b, uint64_t peer, const char *name, uint64_t life,
                       Ballast__RankState *rank)
{
    Ballast__Hello h = BALLAST__HELLO__INIT;
    h.name = (char *)name;
    h.node = "n1";
    h.machine = "m1";
    h.memory_bytes = 8ull << 30;
    h.ranks = &rank;
    h.n_ranks = rank != NULL;
    b->life[peer] = life;
    message(b, peer, M(HELLO), &h.base);
}

static void hello(struct bench *b, uint64_t peer, const char *name, uint64_t life)
{
    b->seq[peer] = 0;
    hello_with(b, peer, name, life, NULL);
}

static Ballast__RankState rank_state(job_id job, uint32_t attempt, uint32_t rank,
                                     Ballast__RankPhase phase)
{
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    s.job_id = job;
    s.attempt = attempt;
    s.rank = rank;
    s.phase = phase;
    return s;
}

static void beat(struct bench *b, uint64_t peer, Ballast__RankState *rank)
{
    Ballast__Heartbeat h = BALLAST__HEARTBEAT__INIT;
    h.ranks = &rank;
    h.n_ranks = rank != NULL;
    message(b, peer, M(HEARTBEAT), &h.base);
}

static Ballast__JobSpec a_spec(uint32_t n_workers)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    spec.name = "job";
    spec.parallel_workers = n_workers;
    spec.train_steps = 10;
    spec.scheduling_max_restarts = 3;
    return spec;
}

static void submit_spec(struct bench *b, uint8_t key, Ballast__JobSpec *spec)
{
    Ballast__SubmitRequest r = BALLAST__SUBMIT_REQUEST__INIT;
    r.spec = spec;
    message_with(b, CLIENT, M(SUBMIT), key, &r.base);
}

static void submit(struct bench *b, uint8_t key, uint32_t n_workers)
{
    Ballast__JobSpec spec = a_spec(n_workers);
    submit_spec(b, key, &spec);
}

static void set(struct bench *b, job_id job, char *assignment)
{
    Ballast__JobSetRequest r = BALLAST__JOB_SET_REQUEST__INIT;
    r.job_id = job;
    r.assignments = &assignment;
    r.n_assignments = 1;
    message_with(b, CLIENT, M(JOB_SET), 3, &r.base);
}

static void call_job(struct bench *b, Ballast__Method method, job_id job, uint8_t key)
{
    Ballast__JobRequest r = BALLAST__JOB_REQUEST__INIT;
    r.job_id = job;
    r.reason = "because";
    message_with(b, CLIENT, method, key, &r.base);
}

static void expect_job(struct bench *b, job_id job, Ballast__JobState state, const char *reason)
{
    struct arena arena = {0};
    const Ballast__Job *j = coord_job(b->c, job, &arena);
    assert_non_null(j);
    assert_int_equal(j->state, state);
    if (reason)
        assert_string_equal(j->reason, reason);
    arena_fini(&arena);
}

/* The state of the last record about the job. */
static const Ballast__RecordState *last_state(const struct bench *b, job_id job)
{
    for (size_t i = b->n_log; i-- > 0;)
        if (b->log[i]->job_id == job && b->log[i]->what_case == BALLAST__RECORD__WHAT_STATE)
            return b->log[i]->state;
    return NULL;
}

static void report(struct bench *b, uint64_t peer, Ballast__RankState s)
{
    message(b, peer, M(RANK_STATE), &s.base);
}

/* Job 1 on w1 and w2, RUNNING. */
static void run_a_job(struct bench *b)
{
    hello(b, W1, "w1", 1);
    hello(b, W2, "w2", 1);
    submit(b, 1, 2);
    assert_non_null(sent(b, W1, M(START)));
    assert_non_null(sent(b, W2, M(START)));
    report(b, W2, rank_state(1, 1, 1, PHASE(READY)));
    report(b, W1, rank_state(1, 1, 0, PHASE(RUNNING)));
    expect_job(b, 1, JOB(RUNNING), NULL);
}

/* Replaying the records gives the same job. */
static void check_replay(struct bench *b)
{
    struct coord_config config = coord_config_default();
    struct coord *again = coord_create(&config);
    struct err err;
    for (size_t i = 0; i < b->n_log; i++)
        assert_int_equal(coord_apply(again, b->log[i], &err), 0);
    char *dump = coord_dump(b->c), *dump_again = coord_dump(again);
    assert_string_equal(dump, dump_again);
    free(dump);
    free(dump_again);
    coord_destroy(again);
}

/* ---- submit ------------------------------------------------------------------------------- */

static void one_key_makes_one_job(void **state)
{
    struct bench *b = *state;
    submit(b, 1, 2);
    const Ballast__SubmitReply *first = (const void *)sent(b, CLIENT, M(SUBMIT))->payload;
    assert_int_equal(first->job_id, 1);
    assert_false(first->repeated_key);
    restart(b); /* the key is durable */
    submit(b, 1, 2);
    const Ballast__SubmitReply *again = (const void *)sent(b, CLIENT, M(SUBMIT))->payload;
    assert_int_equal(again->job_id, 1);
    assert_true(again->repeated_key);
    assert_int_equal(b->turn.n_records, 0);
    submit(b, 1, 3);
    assert_int_equal(code(b, CLIENT, M(SUBMIT)), BALLAST__CODE__ALREADY_EXISTS);
    submit(b, 2, 3);
    assert_int_equal(((const Ballast__SubmitReply *)sent(b, CLIENT, M(SUBMIT))->payload)->job_id,
                     2);
    expect_job(b, 2, JOB(QUEUED), "needs 3 workers, 0 attached, 0 free");
}

static void a_bad_submit_changes_nothing(void **state)
{
    struct bench *b = *state;
    submit(b, 0, 2);
    assert_int_equal(code(b, CLIENT, M(SUBMIT)), BALLAST__CODE__INVALID_ARGUMENT);
    submit(b, 1, 0);
    assert_int_equal(code(b, CLIENT, M(SUBMIT)), BALLAST__CODE__INVALID_ARGUMENT);
    uint64_t after = 9;
    Ballast__JobSpec spec = a_spec(1);
    spec.scheduling_after = &after;
    spec.n_scheduling_after = 1;
    submit_spec(b, 1, &spec);
    assert_int_equal(code(b, CLIENT, M(SUBMIT)), BALLAST__CODE__NOT_FOUND);
    assert_int_equal(b->n_log, 1); /* the epoch */
}

static void a_job_must_fit_where_its_experts_lie_on_several_nodes(void **state)
{
    struct bench *b = *state;
    Ballast__Hello h = BALLAST__HELLO__INIT;
    static const char *const nodes[] = {"n1", "n1", "n2", "n2"};
    for (uint64_t i = 0; i < 4; i++) {
        h.name = (char *)(const char *[]){"a", "b", "c", "d"}[i];
        h.node = (char *)nodes[i];
        h.machine = "m1";
        h.memory_bytes = 8ull << 30;
        b->life[W1 + i] = 1;
        message(b, W1 + i, M(HELLO), &h.base);
    }
    Ballast__JobSpec spec = a_spec(4);
    spec.memory_bytes_per_rank = 8ull << 30;
    spec.memory_bytes_spread = 9ull << 30;
    spec.parallel_expert_parallel_degree = 4;
    submit_spec(b, 1, &spec);
    const Ballast__Status *s = sent(b, CLIENT, M(SUBMIT))->envelope.status;
    assert_int_equal(s->code, BALLAST__CODE__RESOURCE_EXHAUSTED);
    assert_string_equal(s->message, "a rank needs 9216 MiB of memory where its experts lie on "
                        "several nodes; of the 4 workers attached 0 have that, 4 are needed");
    spec.parallel_expert_parallel_degree = 2; /* each group on a node */
    submit_spec(b, 2, &spec);
    expect_job(b, 1, JOB(STARTING), NULL);
}

static void a_job_waits_for_the_one_it_comes_after(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    submit(b, 1, 2); /* never fits */
    uint64_t after = 1;
    Ballast__JobSpec spec = a_spec(1);
    spec.scheduling_after = &after;
    spec.n_scheduling_after = 1;
    submit_spec(b, 2, &spec);
    submit_spec(b, 3, &spec);
    after = 3;
    submit_spec(b, 4, &spec);
    expect_job(b, 2, JOB(QUEUED), "waits until job 1 is DONE");
    call_job(b, M(JOB_CANCEL), 1, 9);
    assert_string_equal(last_state(b, 1)->reason, "cancelled: because");
    assert_string_equal(last_state(b, 2)->reason, "job 1 of scheduling.after is CANCELLED");
    assert_int_equal(last_state(b, 4)->state, JOB(CANCELLED)); /* down the line */
}

/* ---- an attempt --------------------------------------------------------------------------- */

static void start_is_repeated_until_the_rank_shows(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    submit(b, 1, 1);
    const Ballast__Start *s = (const void *)sent(b, W1, M(START))->payload;
    assert_int_equal(s->attempt, 1);
    assert_int_equal(s->coll_id.len, 16);
    assert_string_equal(s->gang[0]->worker, "w1");
    assert_string_equal(s->gang[0]->node, "n1");
    beat(b, W1, NULL);
    assert_non_null(sent(b, W1, M(START)));
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(SPAWNED));
    beat(b, W1, &r);
    assert_null(sent(b, W1, M(START)));
    assert_non_null(sent(b, W1, M(ACK)));
}

/* Ranks that share no memory: each tells where it listens, and when all have each hears it. */
static void ranks_hear_where_the_others_listen(void **state)
{
    struct bench *b = *state;
    uint8_t keys[2][DATA_KEY_BYTES] = {{1}, {2}};
    hello(b, W1, "w1", 1);
    hello(b, W2, "w2", 1);
    submit(b, 1, 2);
    const Ballast__Start *s = (const void *)sent(b, W1, M(START))->payload;
    assert_string_equal(s->gang[0]->machine, "m1");
    Ballast__RankState r0 = rank_state(1, 1, 0, PHASE(SPAWNED));
    Ballast__RankState r1 = rank_state(1, 1, 1, PHASE(SPAWNED));
    r0.data_address = "tcp://10.0.0.1:5000";
    r0.data_key = (ProtobufCBinaryData){DATA_KEY_BYTES, keys[0]};
    r1.data_address = "tcp://10.0.0.2:5000";
    r1.data_key = (ProtobufCBinaryData){DATA_KEY_BYTES, keys[1]};
    report(b, W1, r0);
    assert_null(sent(b, W1, M(PEERS)));
    restart(b); /* who has told tells again, in its hello */
    hello_with(b, W2, "w2", 1, &r1);
    assert_null(sent(b, W2, M(PEERS)));
    hello_with(b, W1, "w1", 1, &r0);
    for (uint64_t peer = W1; peer <= W2; peer++) {
        const Ballast__Peers *p = (const void *)sent(b, peer, M(PEERS))->payload;
        assert_true(p->job_id == 1 && p->attempt == 1 && p->n_peers == 2);
        assert_string_equal(p->peers[1]->address, "tcp://10.0.0.2:5000");
        assert_memory_equal(p->peers[0]->key.data, keys[0], DATA_KEY_BYTES);
    }
    beat(b, W2, &r1); /* it was lost */
    assert_non_null(sent(b, W2, M(PEERS)));
    assert_null(sent(b, W1, M(PEERS)));
    r1.phase = PHASE(READY);
    beat(b, W2, &r1);
    assert_null(sent(b, W2, M(PEERS)));
}

static void a_finished_rank_is_acknowledged_when_all_have(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState first = rank_state(1, 1, 0, PHASE(FINISHED));
    report(b, W1, first);
    assert_null(sent(b, W1, M(ACK))); /* a restart must hear it again */
    restart(b);
    hello_with(b, W1, "w1", 1, &first);
    Ballast__RankState second = rank_state(1, 1, 1, PHASE(RUNNING));
    hello_with(b, W2, "w2", 1, &second);
    expect_job(b, 1, JOB(RUNNING), NULL);
    report(b, W2, rank_state(1, 1, 1, PHASE(FINISHED)));
    assert_int_equal(last_state(b, 1)->state, JOB(DONE));
    assert_true(((const Ballast__Ack *)sent(b, W2, M(ACK))->payload)->ended);
    beat(b, W1, &first);
    const Ballast__Ack *ack = NULL;
    for (size_t i = 0; i < b->turn.n_out; i++)
        if (((const Ballast__Ack *)b->turn.out[i].payload)->job_id)
            ack = (const void *)b->turn.out[i].payload;
    assert_non_null(ack);
    assert_true(ack->ended);
}

static void a_warning_is_the_reason_while_the_job_runs(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    r.text = "no checkpoint of step 4: disk full";
    report(b, W1, r);
    expect_job(b, 1, JOB(RUNNING), "no checkpoint of step 4: disk full");
    report(b, W1, rank_state(1, 1, 0, PHASE(RUNNING)));
    expect_job(b, 1, JOB(RUNNING), "");
    report(b, W1, r);
    report(b, W2, rank_state(1, 1, 1, PHASE(FAILED)));
    expect_job(b, 1, JOB(STOPPING), NULL);
    assert_null(strstr(last_state(b, 1)->reason, "no checkpoint"));
}

static void a_failed_rank_stops_the_gang_and_it_starts_again(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 1, PHASE(FAILED));
    r.exit_signal = 11;
    r.retryable = true;
    report(b, W2, r);
    assert_string_equal(last_state(b, 1)->reason, "rank 1 on worker w2: killed by signal 11");
    assert_non_null(sent(b, W1, M(STOP)));
    pass(b, 1.5);
    expect_job(b, 1, JOB(RECOVERING), "rank 1 on worker w2: killed by signal 11; waits for rank 0 "
                                      "on worker w1 to end");
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    const Ballast__Start *s = (const void *)sent(b, W2, M(START))->payload;
    assert_int_equal(s->attempt, 2);
}

static void a_failure_that_would_come_again_ends_the_job(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 1, PHASE(FAILED));
    r.exit_code = 1;
    r.text = "data.train: no such file";
    report(b, W2, r);
    assert_int_equal(last_state(b, 1)->state, JOB(STOPPING));
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    assert_int_equal(last_state(b, 1)->state, JOB(FAILED));
    assert_string_equal(last_state(b, 1)->reason,
                        "rank 1 on worker w2: data.train: no such file");
    assert_string_equal(last_state(b, 1)->exit, "1");
}

static void the_cause_wins_over_the_first_news(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(FAILED));
    r.retryable = true;
    r.text = "a collective failed";
    report(b, W1, r);
    assert_int_equal(last_state(b, 1)->state, JOB(RECOVERING));
    Ballast__RankState cause = rank_state(1, 1, 1, PHASE(FAILED));
    cause.text = "no such file";
    report(b, W2, cause);
    assert_int_equal(last_state(b, 1)->state, JOB(FAILED));
    assert_string_equal(last_state(b, 1)->reason, "rank 1 on worker w2: no such file");
}

/* What happens to attempt number `attempt` of job 1 on w1; at_checkpoint 0: before any. */
static void crash(struct bench *b, uint32_t attempt, uint64_t at_checkpoint)
{
    Ballast__RankState r = rank_state(1, attempt, 0, PHASE(FAILED));
    r.retryable = true;
    r.text = "crash";
    r.step = r.checkpoint_step = at_checkpoint;
    report(b, W1, r);
}

static void a_new_checkpoint_renews_the_budget(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    submit(b, 1, 1);
    for (uint32_t attempt = 1; attempt <= 13; attempt++) {
        crash(b, attempt, attempt <= 10 ? attempt : 10);
        pass(b, 0.001);
        assert_int_equal(last_state(b, 1)->state, attempt < 13 ? JOB(RECOVERING) : JOB(FAILED));
        for (int i = 0; i < 10; i++) {
            pass(b, 1);
            beat(b, W1, NULL);
        }
    }
}

static void restarts_have_a_budget(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    submit(b, 1, 1);
    for (uint32_t attempt = 1; attempt <= 4; attempt++) {
        crash(b, attempt, 0);
        pass(b, 0.9); /* the first backoff is 1 s */
        if (attempt < 4)
            expect_job(b, 1, JOB(RECOVERING), NULL);
        for (int i = 0; i < 10; i++) {
            pass(b, 1);
            beat(b, W1, NULL);
        }
    }
    assert_int_equal(last_state(b, 1)->state, JOB(FAILED));
    assert_string_equal(last_state(b, 1)->reason, "rank 0 on worker w1: crash; it was restarted "
                        "3 times without a new checkpoint, as often as scheduling.max_restarts "
                        "allows");
}

static void a_silent_worker_loses_its_rank(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    for (int i = 0; i < 12; i++) {
        pass(b, 1);
        beat(b, W1, &r);
    }
    assert_int_equal(last_state(b, 1)->state, JOB(RECOVERING));
    assert_string_equal(last_state(b, 1)->reason,
                        "rank 1: worker w2 is lost: silent for 10.0 s");
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    pass(b, 1);
    expect_job(b, 1, JOB(RECOVERING),
               "rank 1: worker w2 is lost: silent for 10.0 s; needs 2 workers, 1 attached, 1 free");
    Ballast__RankState late = rank_state(1, 1, 1, PHASE(RUNNING));
    beat(b, W2, &late); /* it was only cut off */
    const struct outgoing *stop = sent(b, W2, M(STOP));
    assert_non_null(stop);
    assert_int_equal(((const Ballast__Stop *)stop->payload)->attempt, 1);
    expect_job(b, 1, JOB(RECOVERING), NULL); /* not before its old trainer has ended */
    beat(b, W2, NULL);
    assert_non_null(sent(b, W2, M(START)));
}

static void a_whole_gang_that_is_silent_must_be_fenced(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    submit(b, 1, 1);
    report(b, W1, rank_state(1, 1, 0, PHASE(RUNNING)));
    hello(b, W2, "w2", 1);
    for (int i = 0; i < 310; i++) {
        pass(b, 1);
        beat(b, W2, NULL);
    }
    expect_job(b, 1, JOB(RECOVERING), NULL); /* w1 may still train */
    for (int i = 0; i < 15; i++) {
        pass(b, 1);
        beat(b, W2, NULL);
    }
    expect_job(b, 1, JOB(STARTING), NULL); /* by now it has ended itself */
}

static void cancel_is_bounded_and_may_be_repeated(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    call_job(b, M(JOB_CANCEL), 1, 5);
    const Ballast__Stop *s = (const void *)sent(b, W1, M(STOP))->payload;
    assert_int_equal(s->mode, BALLAST__STOP_MODE__STOP_NOW);
    assert_int_equal(s->grace_ms, 5000);
    expect_job(b, 1, JOB(STOPPING), NULL);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    beat(b, W1, &r);
    assert_non_null(sent(b, W1, M(STOP))); /* the first may be lost */
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    report(b, W2, rank_state(1, 1, 1, PHASE(STOPPED)));
    assert_int_equal(last_state(b, 1)->state, JOB(CANCELLED));
    size_t n = b->n_log;
    call_job(b, M(JOB_CANCEL), 1, 5);
    assert_int_equal(code(b, CLIENT, M(JOB_CANCEL)), BALLAST__CODE__OK);
    assert_int_equal(b->n_log, n);
    call_job(b, M(JOB_CANCEL), 99, 5);
    assert_int_equal(code(b, CLIENT, M(JOB_CANCEL)), BALLAST__CODE__NOT_FOUND);
}

static void the_time_limit_saves_and_ends(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    Ballast__JobSpec spec = a_spec(1);
    spec.scheduling_time_limit_s = 5;
    submit_spec(b, 1, &spec);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    report(b, W1, r);
    for (int i = 0; i < 5; i++) {
        expect_job(b, 1, JOB(RUNNING), NULL);
        pass(b, 1);
        beat(b, W1, &r);
    }
    const Ballast__Stop *s = (const void *)sent(b, W1, M(STOP))->payload;
    assert_int_equal(s->mode, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    r.phase = PHASE(STOPPED);
    report(b, W1, r);
    assert_int_equal(last_state(b, 1)->state, JOB(FAILED));
}

static void expect_code(struct bench *b, Ballast__Method method, job_id job, uint8_t key,
                        Ballast__Code expected, const char *text)
{
    call_job(b, method, job, key);
    const struct outgoing *o = sent(b, CLIENT, method);
    assert_non_null(o);
    assert_int_equal(o->envelope.status->code, expected);
    if (text && !strstr(o->envelope.status->message, text))
        fail_msg("%s", o->envelope.status->message);
}

static void hold_release_requeue(void **state)
{
    struct bench *b = *state;
    submit(b, 1, 1);
    call_job(b, M(JOB_HOLD), 1, 5);
    hello(b, W1, "w1", 1);
    expect_job(b, 1, JOB(QUEUED), HELD("ann: because"));
    call_job(b, M(JOB_REQUEUE), 1, 7); /* it is in the queue */
    assert_int_equal(code(b, CLIENT, M(JOB_REQUEUE)), BALLAST__CODE__OK);
    expect_job(b, 1, JOB(QUEUED), HELD("ann: because"));
    call_job(b, M(JOB_RELEASE), 1, 6);
    expect_job(b, 1, JOB(STARTING), NULL);
    call_job(b, M(JOB_HOLD), 1, 5);
    assert_int_equal(code(b, CLIENT, M(JOB_HOLD)), BALLAST__CODE__FAILED_PRECONDITION);
    report(b, W1, rank_state(1, 1, 0, PHASE(FINISHED)));
    assert_int_equal(last_state(b, 1)->state, JOB(DONE));
    pass(b, 0);
    begin(b);
    finish(b);
    assert_null(coord_job_spec(b->c, 1)); /* forgotten, and brought back for this: */
    call_job(b, M(JOB_REQUEUE), 1, 8);
    assert_int_equal(code(b, CLIENT, M(JOB_REQUEUE)), BALLAST__CODE__OK);
    size_t n = b->n_log;
    call_job(b, M(JOB_REQUEUE), 1, 8); /* the answer was lost */
    assert_int_equal(code(b, CLIENT, M(JOB_REQUEUE)), BALLAST__CODE__OK);
    assert_int_equal(b->n_log, n);
    expect_job(b, 1, JOB(STARTING), NULL);
}

static void a_job_may_be_held_from_the_start(void **state)
{
    struct bench *b = *state;
    Ballast__JobSpec spec = a_spec(1);
    Ballast__SubmitRequest r = BALLAST__SUBMIT_REQUEST__INIT;
    r.spec = &spec;
    r.hold = true;
    hello(b, W1, "w1", 1);
    message_with(b, CLIENT, M(SUBMIT), 1, &r.base);
    expect_job(b, 1, JOB(QUEUED), HELD("ann"));
    size_t n = b->n_log;
    message_with(b, CLIENT, M(SUBMIT), 1, &r.base); /* the answer was lost */
    assert_int_equal(code(b, CLIENT, M(SUBMIT)), BALLAST__CODE__OK);
    assert_int_equal(b->n_log, n);
    r.hold = false;
    message_with(b, CLIENT, M(SUBMIT), 1, &r.base); /* the same key asks for something else */
    assert_int_equal(code(b, CLIENT, M(SUBMIT)), BALLAST__CODE__ALREADY_EXISTS);
    check_replay(b);
    restart(b);
    hello(b, W1, "w1", 1);
    expect_job(b, 1, JOB(QUEUED), HELD("ann"));
    b->user = "bob";
    call_job(b, M(JOB_HOLD), 1, 5); /* for another reason */
    expect_job(b, 1, JOB(QUEUED), HELD("bob: because"));
    expect_code(b, M(JOB_RESUME), 1, 6, BALLAST__CODE__FAILED_PRECONDITION,
                "job 1 is QUEUED; it is held: ballast job release 1 lets it start");
    call_job(b, M(JOB_RELEASE), 1, 7);
    expect_job(b, 1, JOB(STARTING), NULL);
}

/* ---- pause, resume, requeue --------------------------------------------------------------- */

static Ballast__RankState saved(uint32_t rank, uint64_t step)
{
    Ballast__RankState s = rank_state(1, 1, rank, PHASE(STOPPED));
    s.checkpoint_step = s.step = step;
    return s;
}

/* Ranks are told to write a checkpoint, with the time for it. */
static void stop_and_save(struct bench *b, Ballast__Method method)
{
    call_job(b, method, 1, 5);
    const Ballast__Stop *s = (const void *)sent(b, W1, M(STOP))->payload;
    assert_int_equal(s->mode, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    assert_int_equal(s->grace_ms, 900000);
}

static void a_pause_saves_and_gives_the_workers_back(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    stop_and_save(b, M(JOB_PAUSE));
    restart(b); /* the coordinator is killed meanwhile */
    hello_with(b, W1, "w1", 1, &(Ballast__RankState[]){rank_state(1, 1, 0, PHASE(STOPPING))}[0]);
    const Ballast__Stop *s = (const void *)sent(b, W1, M(STOP))->payload;
    assert_int_equal(s->mode, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    hello_with(b, W2, "w2", 1, &(Ballast__RankState[]){rank_state(1, 1, 1, PHASE(STOPPING))}[0]);
    report(b, W1, saved(0, 7));
    expect_job(b, 1, JOB(STOPPING), "paused by ann: because; waits for rank 1 on worker w2 to end");
    report(b, W2, saved(1, 7));
    expect_job(b, 1, JOB(PAUSED),
               "paused by ann: because; ballast job resume 1 lets it go on from step 7");
    submit(b, 2, 2); /* somebody else may have the workers */
    expect_job(b, 2, JOB(STARTING), NULL);
    check_replay(b);
    restart(b);
    expect_job(b, 1, JOB(PAUSED), NULL);
    call_job(b, M(JOB_RESUME), 1, 6);
    expect_job(b, 1, JOB(QUEUED), NULL);
    size_t n = b->n_log;
    call_job(b, M(JOB_RESUME), 1, 6); /* the answer was lost */
    assert_int_equal(code(b, CLIENT, M(JOB_RESUME)), BALLAST__CODE__OK);
    call_job(b, M(JOB_PAUSE), 1, 5); /* so was the first pause's: it is not done again */
    assert_int_equal(code(b, CLIENT, M(JOB_PAUSE)), BALLAST__CODE__OK);
    assert_int_equal(b->n_log, n);
    hello_with(b, W1, "w1", 1, &(Ballast__RankState[]){rank_state(2, 1, 0, PHASE(FINISHED))}[0]);
    hello_with(b, W2, "w2", 1, &(Ballast__RankState[]){rank_state(2, 1, 1, PHASE(FINISHED))}[0]);
    expect_job(b, 1, JOB(STARTING), NULL);
    struct arena arena = {0};
    const Ballast__Job *j = coord_job(b->c, 1, &arena);
    assert_int_equal(j->attempt, 2);
    assert_int_equal(j->n_restarts, 0);
    assert_int_equal(j->checkpoint_step, 7);
    assert_true(j->started_at_ns > 0);
    arena_fini(&arena);
    check_replay(b);
}

static void a_pause_that_loses_a_rank_says_what_it_costs(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    r.checkpoint_step = 3;
    report(b, W1, r);
    call_job(b, M(JOB_PAUSE), 1, 5);
    r = rank_state(1, 1, 1, PHASE(FAILED));
    r.text = "the disk is full";
    r.retryable = true;
    report(b, W2, r);
    const Ballast__Stop *s = (const void *)sent(b, W1, M(STOP))->payload;
    assert_int_equal(s->mode, BALLAST__STOP_MODE__STOP_NOW); /* it would wait for ever */
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    expect_job(b, 1, JOB(PAUSED), "paused by ann: because; rank 1 on worker w2: the disk is full; "
               "ballast job resume 1 lets it go on from step 3");
}

static void a_pause_of_what_cannot_go_on_is_a_failure(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    call_job(b, M(JOB_PAUSE), 1, 5);
    Ballast__RankState r = rank_state(1, 1, 1, PHASE(FAILED));
    r.text = "the loss is not a number";
    report(b, W2, r);
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    assert_int_equal(last_state(b, 1)->state, JOB(FAILED));
}

static void a_silent_worker_does_not_hold_a_pause_up(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    call_job(b, M(JOB_PAUSE), 1, 5);
    report(b, W2, saved(1, 7));
    for (int i = 0; i < 11; i++) {
        pass(b, 1);
        beat(b, W2, NULL);
    }
    expect_job(b, 1, JOB(PAUSED), NULL);
}

static void a_mind_may_change_before_the_ranks_have_ended(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    call_job(b, M(JOB_PAUSE), 1, 5);
    call_job(b, M(JOB_PAUSE), 1, 15); /* asked twice */
    call_job(b, M(JOB_RESUME), 1, 6);
    expect_job(b, 1, JOB(STOPPING), NULL);
    call_job(b, M(JOB_PAUSE), 1, 7);
    call_job(b, M(JOB_RESUME), 1, 8);
    check_replay(b);
    report(b, W1, saved(0, 7));
    report(b, W2, saved(1, 7));
    expect_job(b, 1, JOB(STARTING), NULL); /* QUEUED for a moment */
    call_job(b, M(JOB_PAUSE), 1, 9);
    call_job(b, M(JOB_CANCEL), 1, 10);
    const Ballast__Stop *s = (const void *)sent(b, W1, M(STOP))->payload;
    assert_int_equal(s->mode, BALLAST__STOP_MODE__STOP_NOW);
    expect_code(b, M(JOB_RESUME), 1, 11, BALLAST__CODE__FAILED_PRECONDITION, "job 1 is STOPPING; "
                "only a job that is PAUSED can be resumed");
    expect_code(b, M(JOB_PAUSE), 1, 12, BALLAST__CODE__FAILED_PRECONDITION, "job 1 is STOPPING; "
                "only a job that has not ended can be paused");
    Ballast__RankState r = rank_state(1, 2, 0, PHASE(STOPPED));
    report(b, W1, r);
    r.rank = 1;
    report(b, W2, r);
    assert_int_equal(last_state(b, 1)->state, JOB(CANCELLED));
    assert_string_equal(last_state(b, 1)->reason, "cancelled: because");
    check_replay(b);
}

static void calls_about_a_paused_job(void **state)
{
    struct bench *b = *state;
    submit(b, 1, 1);
    expect_code(b, M(JOB_RESUME), 1, 2, BALLAST__CODE__FAILED_PRECONDITION, "job 1 is QUEUED");
    call_job(b, M(JOB_HOLD), 1, 3);
    call_job(b, M(JOB_PAUSE), 1, 4); /* it never ran */
    expect_job(b, 1, JOB(PAUSED),
               "paused by ann: because; ballast job resume 1 lets it go on");
    expect_code(b, M(JOB_HOLD), 1, 5, BALLAST__CODE__FAILED_PRECONDITION,
                "job 1 is PAUSED; it does not start before it is resumed");
    expect_code(b, M(JOB_REQUEUE), 1, 6, BALLAST__CODE__FAILED_PRECONDITION,
                "job 1 is PAUSED; ballast job resume 1 lets it go on");
    expect_code(b, M(JOB_PAUSE), 9, 6, BALLAST__CODE__NOT_FOUND, NULL);
    hello(b, W1, "w1", 1);
    expect_job(b, 1, JOB(PAUSED), NULL);
    call_job(b, M(JOB_RESUME), 1, 7);
    expect_job(b, 1, JOB(QUEUED), HELD("ann: because")); /* that it was held stays */
    call_job(b, M(JOB_PAUSE), 1, 8);
    call_job(b, M(JOB_RELEASE), 1, 9);
    call_job(b, M(JOB_RESUME), 1, 10);
    expect_job(b, 1, JOB(STARTING), NULL);
    submit(b, 2, 1);
    call_job(b, M(JOB_PAUSE), 2, 11);
    call_job(b, M(JOB_CANCEL), 2, 12);
    assert_int_equal(last_state(b, 2)->state, JOB(CANCELLED));
    expect_code(b, M(JOB_PAUSE), 2, 13, BALLAST__CODE__FAILED_PRECONDITION, "job 2 is CANCELLED");
    check_replay(b);
}

static void a_recovering_job_pauses_once_its_ranks_have_ended(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 1, PHASE(FAILED));
    r.retryable = true;
    report(b, W2, r);
    call_job(b, M(JOB_PAUSE), 1, 5);
    expect_job(b, 1, JOB(STOPPING), NULL);
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    expect_job(b, 1, JOB(PAUSED), NULL);
    call_job(b, M(JOB_RESUME), 1, 6);
    expect_job(b, 1, JOB(STARTING), NULL); /* a person does not wait for a backoff */
}

static void a_requeue_saves_and_starts_where_there_is_room(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    stop_and_save(b, M(JOB_REQUEUE));
    restart(b); /* the coordinator is killed meanwhile */
    hello_with(b, W1, "w1", 1, &(Ballast__RankState[]){rank_state(1, 1, 0, PHASE(STOPPING))}[0]);
    hello_with(b, W2, "w2", 1, &(Ballast__RankState[]){rank_state(1, 1, 1, PHASE(STOPPING))}[0]);
    size_t n = b->n_log;
    call_job(b, M(JOB_REQUEUE), 1, 5); /* the answer was lost */
    call_job(b, M(JOB_REQUEUE), 1, 6); /* asked twice */
    assert_int_equal(code(b, CLIENT, M(JOB_REQUEUE)), BALLAST__CODE__OK);
    assert_int_equal(b->n_log, n);
    expect_job(b, 1, JOB(STOPPING), "requeued by ann: because; waits for rank 0 on worker w1 to end");
    Ballast__WorkerDrainRequest drain = BALLAST__WORKER_DRAIN_REQUEST__INIT;
    drain.name = "w2"; /* it is to go on without this one */
    message(b, CLIENT, M(WORKER_DRAIN), &drain.base);
    report(b, W1, saved(0, 7));
    report(b, W2, saved(1, 7));
    expect_job(b, 1, JOB(QUEUED), "needs 2 workers, 1 attached, 1 free");
    call_job(b, M(JOB_REQUEUE), 1, 5); /* lost for long */
    expect_job(b, 1, JOB(QUEUED), NULL);
    hello(b, OTHER, "w3", 1);
    expect_job(b, 1, JOB(STARTING), NULL);
    struct arena arena = {0};
    const Ballast__Job *j = coord_job(b->c, 1, &arena);
    assert_int_equal(j->attempt, 2);
    assert_int_equal(j->n_restarts, 0);
    assert_int_equal(j->checkpoint_step, 7);
    assert_string_equal(j->workers[1], "w3");
    arena_fini(&arena);
    n = b->n_log;
    call_job(b, M(JOB_REQUEUE), 1, 5); /* what came after it stays */
    assert_int_equal(b->n_log, n);
    Ballast__RankState r = rank_state(1, 2, 0, PHASE(RUNNING));
    r.resumed_from_step = 7;
    report(b, W1, r);
    expect_job(b, 1, JOB(RUNNING), NULL);
    assert_int_equal(last_state(b, 1)->attempt, 2); /* the history tells where it goes on */
    assert_int_equal(last_state(b, 1)->resumed_from_step, 7);
    check_replay(b);
}

static void a_requeue_of_what_recovers_does_not_wait(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__RankState r = rank_state(1, 1, 1, PHASE(FAILED));
    r.retryable = true;
    report(b, W2, r);
    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    expect_job(b, 1, JOB(RECOVERING), NULL);
    call_job(b, M(JOB_REQUEUE), 1, 5);
    expect_job(b, 1, JOB(STARTING), NULL); /* a person does not wait for a backoff */
    check_replay(b);
    call_job(b, M(JOB_PAUSE), 1, 6);
    call_job(b, M(JOB_REQUEUE), 1, 7); /* another mind, before the ranks have ended */
    r = rank_state(1, 2, 1, PHASE(STOPPED));
    report(b, W2, r);
    r.rank = 0;
    report(b, W1, r);
    expect_job(b, 1, JOB(STARTING), NULL);
    call_job(b, M(JOB_CANCEL), 1, 8);
    expect_code(b, M(JOB_REQUEUE), 1, 9, BALLAST__CODE__FAILED_PRECONDITION,
                "job 1 is STOPPING; it can be queued again once it has ended");
    check_replay(b);
}

static void a_limited_user_changes_his_own_jobs_only(void **state)
{
    struct bench *b = *state;
    static const Ballast__Method methods[] = {M(JOB_HOLD), M(JOB_RELEASE), M(JOB_PAUSE),
                                              M(JOB_RESUME), M(JOB_CANCEL), M(JOB_REQUEUE)};
    submit(b, 1, 1);
    b->is_limited = true;
    b->user = "bob";
    size_t n = b->n_log;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        expect_code(b, methods[i], 1, (uint8_t)(2 + i), BALLAST__CODE__PERMISSION_DENIED,
                    "job 1 belongs to ann; bob may change no jobs but his own");
    set(b, 1, "scheduling.priority=2");
    assert_int_equal(code(b, CLIENT, M(JOB_SET)), BALLAST__CODE__PERMISSION_DENIED);
    Ballast__RebalanceRequest r = BALLAST__REBALANCE_REQUEST__INIT;
    r.job_id = 1;
    message(b, CLIENT, M(REBALANCE_AUTO), &r.base);
    assert_int_equal(code(b, CLIENT, M(REBALANCE_AUTO)), BALLAST__CODE__PERMISSION_DENIED);
    assert_int_equal(b->n_log, n);
    submit(b, 9, 1);
    call_job(b, M(JOB_HOLD), 2, 10);
    assert_int_equal(code(b, CLIENT, M(JOB_HOLD)), BALLAST__CODE__OK);
    assert_string_equal(b->log[b->n_log - 1]->by, "bob"); /* the log says who */
}

static void a_wait_is_answered_by_the_state_or_by_time(void **state)
{
    struct bench *b = *state;
    Ballast__JobWaitRequest r = BALLAST__JOB_WAIT_REQUEST__INIT;
    Ballast__JobState wanted[] = {JOB(STARTING)};
    submit(b, 1, 1);
    r.job_id = 1;
    r.wait_ms = 2000;
    r.states = wanted;
    r.n_states = 1;
    message(b, CLIENT, M(JOB_WAIT), &r.base);
    assert_null(sent(b, CLIENT, M(JOB_WAIT)));
    hello(b, W1, "w1", 1);
    assert_non_null(sent(b, CLIENT, M(JOB_WAIT)));
    r.n_states = 0; /* until it ends */
    message(b, CLIENT, M(JOB_WAIT), &r.base);
    pass(b, 1.9);
    assert_null(sent(b, CLIENT, M(JOB_WAIT)));
    b->now_ns += NS_PER_S / 10;
    begin(b);
    finish(b);
    assert_non_null(sent(b, CLIENT, M(JOB_WAIT)));
}

/* ---- workers ------------------------------------------------------------------------------ */

static void a_second_life_waits_until_the_first_is_silent(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    hello(b, OTHER, "w1", 2);
    assert_int_equal(code(b, OTHER, M(HELLO)), BALLAST__CODE__ALREADY_EXISTS);
    assert_non_null(sent(b, W1, M(ACK))); /* is the first there? */
    begin(b);
    coord_peer_gone(b->c, &b->turn, W1); /* no */
    finish(b);
    hello(b, OTHER, "w1", 2);
    assert_int_equal(code(b, OTHER, M(HELLO)), BALLAST__CODE__OK);
    assert_string_equal(last_state(b, 1)->reason, "rank 0: worker w1 was restarted");
    report(b, W2, rank_state(1, 1, 1, PHASE(STOPPED)));
    pass(b, 1.5);
    expect_job(b, 1, JOB(RECOVERING), NULL); /* the orphaned trainer may live for 2 s */
    pass(b, 0.6);
    expect_job(b, 1, JOB(STARTING), NULL);
}

static void an_overtaken_heartbeat_proves_nothing(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    b->seq[W1] -= 2;
    beat(b, W1, NULL); /* it was sent before the START came */
    expect_job(b, 1, JOB(RUNNING), NULL);
    b->seq[W1] += 2;
    beat(b, W1, NULL);
    assert_string_equal(last_state(b, 1)->reason, "worker w1 does not hold rank 0 any more");
}

static void who_is_not_known_is_asked_for_a_hello(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    restart(b);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    beat(b, W1, &r);
    const Ballast__Ack *a = (const void *)sent(b, W1, M(ACK))->payload;
    assert_false(a->alive);
    assert_null(sent(b, W1, M(STOP))); /* its rank is still wanted */
    hello_with(b, W1, "w1", 1, &r);
    r.rank = 1;
    hello_with(b, W2, "w2", 1, &r);
    pass(b, 1);
    expect_job(b, 1, JOB(RUNNING), NULL);
    assert_int_equal(coord_epoch(b->c), 2);
}

static void who_does_not_come_back_is_lost_after_the_grace(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    restart(b);
    Ballast__RankState r = rank_state(1, 1, 0, PHASE(RUNNING));
    hello_with(b, W1, "w1", 1, &r);
    for (int i = 0; i < 29; i++) {
        pass(b, 1);
        beat(b, W1, &r);
    }
    expect_job(b, 1, JOB(RUNNING), NULL);
    pass(b, 1);
    expect_job(b, 1, JOB(RECOVERING), NULL);
}

static void nobody_is_blamed_for_a_stall_of_the_coordinator(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    b->now_ns += 600 * NS_PER_S; /* stopped, or a slow disk */
    begin(b);
    finish(b);
    expect_job(b, 1, JOB(RUNNING), NULL);
    pass(b, 9);
    expect_job(b, 1, JOB(RUNNING), NULL);
    pass(b, 2);
    expect_job(b, 1, JOB(RECOVERING), NULL);
}

static void a_drained_worker_gets_nothing_new(void **state)
{
    struct bench *b = *state;
    Ballast__WorkerDrainRequest r = BALLAST__WORKER_DRAIN_REQUEST__INIT;
    r.name = "w1";
    r.reason = "new memory";
    message(b, CLIENT, M(WORKER_DRAIN), &r.base);
    assert_int_equal(code(b, CLIENT, M(WORKER_DRAIN)), BALLAST__CODE__NOT_FOUND);
    hello(b, W1, "w1", 1);
    message(b, CLIENT, M(WORKER_DRAIN), &r.base);
    submit(b, 1, 1);
    expect_job(b, 1, JOB(QUEUED), "needs 1 worker, 0 attached, 0 free");
    restart(b);
    hello(b, W1, "w1", 1);
    expect_job(b, 1, JOB(QUEUED), NULL);
    message(b, CLIENT, M(WORKER_RESUME), &r.base);
    expect_job(b, 1, JOB(STARTING), NULL);
    message_with(b, CLIENT, M(WORKER_RESUME), 7, &r.base); /* repeated */
    assert_int_equal(code(b, CLIENT, M(WORKER_RESUME)), BALLAST__CODE__OK);
    message_with(b, CLIENT, M(WORKER_RESUME), 8, &r.base); /* asked again */
    assert_int_equal(code(b, CLIENT, M(WORKER_RESUME)), BALLAST__CODE__FAILED_PRECONDITION);
}

static void steps_are_stored_folded_and_acknowledged(void **state)
{
    struct bench *b = *state;
    run_a_job(b);
    Ballast__StepReport step = BALLAST__STEP_REPORT__INIT;
    Ballast__StepReport *steps[] = {&step};
    Ballast__StepReports r = BALLAST__STEP_REPORTS__INIT;
    r.job_id = 1;
    r.attempt = 1;
    r.steps = steps;
    r.n_steps = 1;
    step.step = 3;
    step.loss = 2.5;
    message(b, W1, M(STEPS), &r.base);
    assert_int_equal(b->turn.n_steps, 1);
    assert_int_equal(((const Ballast__Ack *)sent(b, W1, M(ACK))->payload)->step, 3);
    struct arena arena = {0};
    const Ballast__Job *j = coord_job(b->c, 1, &arena);
    assert_int_equal(j->step, 3);
    assert_true(j->loss == 2.5);
    arena_fini(&arena);
    r.attempt = 9; /* never was */
    message(b, W1, M(STEPS), &r.base);
    assert_int_equal(b->turn.n_steps, 0);
}

static void an_idle_core_has_nothing_due(void **state)
{
    struct bench *b = *state;
    submit(b, 1, 1);
    pass(b, 0);
    assert_true(coord_next_deadline_ns(b->c) == UINT64_MAX);
}

static void a_damaged_record_is_refused(void **state)
{
    struct bench *b = *state;
    struct err err;
    Ballast__Record r = BALLAST__RECORD__INIT;
    Ballast__RecordState s = BALLAST__RECORD_STATE__INIT;
    r.seq = 2;
    r.job_id = 1;
    r.what_case = BALLAST__RECORD__WHAT_STATE;
    r.state = &s;
    s.state = JOB(DONE);
    assert_true(coord_apply(b->c, &r, &err) < 0);
    assert_string_equal(err.text, "record 2 of job 1: there is no such job");
    submit(b, 1, 1);
    r.seq = 3;
    assert_true(coord_apply(b->c, &r, &err) < 0);
    assert_string_equal(err.text, "record 3 of job 1: a change of state that is not allowed");
}

/* ---- settings ------------------------------------------------------------------------------- */

static const Ballast__Settings *told(const struct bench *b, uint64_t peer)
{
    const struct outgoing *o = sent(b, peer, M(SETTINGS));
    return o ? (const void *)o->payload : NULL;
}

static uint64_t every(const struct bench *b)
{
    return coord_job_spec(b->c, 1)->checkpoint_every_steps;
}

static void submit_valid(struct bench *b, uint8_t key, uint32_t n_workers, int32_t priority)
{
    Ballast__JobSpec spec;
    a_job_init(&spec, n_workers);
    spec.checkpoint_every_steps = 100;
    spec.scheduling_priority = priority;
    submit_spec(b, key, &spec);
    a_job_fini(&spec);
}

static void settings_are_told_until_every_rank_has_them(void **state)
{
    struct bench *b = *state;
    hello(b, W1, "w1", 1);
    hello(b, W2, "w2", 1);
    submit_valid(b, 1, 2, 0);
    report(b, W1, rank_state(1, 1, 0, PHASE(SPAWNED)));
    set(b, 1, "checkpoint.every_steps=50"); /* STARTING: rank 1 has not heard of its START */
    assert_int_equal(code(b, CLIENT, M(JOB_SET)), BALLAST__CODE__OK);
    assert_int_equal(every(b), 50);
    assert_int_equal(told(b, W1)->revision, 1);
    assert_int_equal(told(b, W1)->spec->checkpoint_every_steps, 50);
    check_replay(b);
    pass(b, 2);
    beat(b, W2, NULL);
    const Ballast__Start *again = (const void *)sent(b, W2, M(START))->payload;
    assert_int_equal(again->spec->checkpoint_every_steps, 100); /* as rank 0 began */
    assert_int_equal(again->settings_revision, 0);

    Ballast__RankState r0 = rank_state(1, 1, 0, PHASE(RUNNING));
    Ballast__RankState r1 = rank_state(1, 1, 1, PHASE(RUNNING));
    beat(b, W2, &r1);
    assert_int_equal(told(b, W2)->revision, 1);
    beat(b, W2, &r1);
    assert_null(told(b, W2)); /* it was just told */
    pass(b, 2);
    beat(b, W1, &r0);
    beat(b, W2, &r1);
    assert_int_equal(told(b, W2)->revision, 1);
    r0.settings_revision = r1.settings_revision = 1;
    pass(b, 2);
    beat(b, W2, &r1);
    assert_null(told(b, W2));
    beat(b, W1, &r0);
    assert_null(told(b, W1));
    size_t n = b->n_log;
    set(b, 1, "checkpoint.every_steps=50"); /* the answer was lost */
    assert_int_equal(code(b, CLIENT, M(JOB_SET)), BALLAST__CODE__OK);
    assert_int_equal(b->n_log, n);
    check_replay(b);

    report(b, W1, rank_state(1, 1, 0, PHASE(STOPPED)));
    report(b, W2, rank_state(1, 1, 1, PHASE(STOPPED)));
    pass(b, 2);
    beat(b, W1, NULL);
    beat(b, W2, NULL);
    const Ballast__Start *next = (const void *)sent(b, W2, M(START))->payload;
    assert_int_equal(next->attempt, 2);
    assert_int_equal(next->spec->checkpoint_every_steps, 50);
    assert_int_equal(next->settings_revision, 1);
}

static void settings_of_waiting_and_ended_jobs(void **state)
{
    struct bench *b = *state;
    submit_valid(b, 1, 1, 0);
    submit_valid(b, 2, 1, 1);
    set(b, 1, "scheduling.priority=2"); /* now it goes first */
    check_replay(b);
    restart(b);
    hello(b, W1, "w1", 1);
    expect_job(b, 1, JOB(STARTING), NULL);
    expect_job(b, 2, JOB(QUEUED), NULL);
    static const struct {
        job_id job;
        char *assignment;
        Ballast__Code code;
        const char *text;
    } rows[] = {
        {9, "checkpoint.keep=2", BALLAST__CODE__NOT_FOUND, "there is no job 9"},
        {1, "train.steps=9", BALLAST__CODE__INVALID_ARGUMENT,
         "key 'train.steps' cannot be changed while a job lives; these can: checkpoint.every"},
        {1, "checkpoint.keep", BALLAST__CODE__INVALID_ARGUMENT, "is not KEY=VALUE"},
        {1, "checkpoint.keep=0", BALLAST__CODE__INVALID_ARGUMENT, "key 'checkpoint.keep': "},
        {3, "checkpoint.keep=2", BALLAST__CODE__FAILED_PRECONDITION, "job 3 is CANCELLED"},
    };
    submit_valid(b, 3, 1, 0);
    call_job(b, M(JOB_CANCEL), 3, 9);
    size_t n = b->n_log;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        set(b, rows[i].job, rows[i].assignment);
        const struct outgoing *o = sent(b, CLIENT, M(JOB_SET));
        assert_int_equal(o->envelope.status->code, rows[i].code);
        if (!strstr(o->envelope.status->message, rows[i].text))
            fail_msg("row %zu: %s", i, o->envelope.status->message);
    }
    assert_int_equal(b->n_log, n);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(one_key_makes_one_job),
        TEST(a_bad_submit_changes_nothing),
        TEST(a_job_must_fit_where_its_experts_lie_on_several_nodes),
        TEST(a_job_waits_for_the_one_it_comes_after),
        TEST(start_is_repeated_until_the_rank_shows),
        TEST(ranks_hear_where_the_others_listen),
        TEST(a_finished_rank_is_acknowledged_when_all_have),
        TEST(a_warning_is_the_reason_while_the_job_runs),
        TEST(a_failed_rank_stops_the_gang_and_it_starts_again),
        TEST(a_failure_that_would_come_again_ends_the_job),
        TEST(the_cause_wins_over_the_first_news),
        TEST(restarts_have_a_budget),
        TEST(a_new_checkpoint_renews_the_budget),
        TEST(a_silent_worker_loses_its_rank),
        TEST(a_whole_gang_that_is_silent_must_be_fenced),
        TEST(cancel_is_bounded_and_may_be_repeated),
        TEST(the_time_limit_saves_and_ends),
        TEST(hold_release_requeue),
        TEST(a_job_may_be_held_from_the_start),
        TEST(a_requeue_saves_and_starts_where_there_is_room),
        TEST(a_requeue_of_what_recovers_does_not_wait),
        TEST(a_limited_user_changes_his_own_jobs_only),
        TEST(a_pause_saves_and_gives_the_workers_back),
        TEST(a_pause_that_loses_a_rank_says_what_it_costs),
        TEST(a_pause_of_what_cannot_go_on_is_a_failure),
        TEST(a_silent_worker_does_not_hold_a_pause_up),
        TEST(a_mind_may_change_before_the_ranks_have_ended),
        TEST(calls_about_a_paused_job),
        TEST(a_recovering_job_pauses_once_its_ranks_have_ended),
        TEST(a_wait_is_answered_by_the_state_or_by_time),
        TEST(a_second_life_waits_until_the_first_is_silent),
        TEST(an_overtaken_heartbeat_proves_nothing),
        TEST(who_is_not_known_is_asked_for_a_hello),
        TEST(who_does_not_come_back_is_lost_after_the_grace),
        TEST(nobody_is_blamed_for_a_stall_of_the_coordinator),
        TEST(a_drained_worker_gets_nothing_new),
        TEST(steps_are_stored_folded_and_acknowledged),
        TEST(an_idle_core_has_nothing_due),
        TEST(a_damaged_record_is_refused),
        TEST(settings_are_told_until_every_rank_has_them),
        TEST(settings_of_waiting_and_ended_jobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
