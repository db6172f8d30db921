/* test_ctl_lists.c - lists as people of Slurm, kubectl and flux expect them: what is asked of the
 * coordinator, and what is made of its answer */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include "tests/a_coordinator.h"

#define N_JOBS 5

static struct {
    Ballast__Job jobs[N_JOBS], *of[N_JOBS];
    Ballast__JobListReply reply;
} fleet_jobs;

/* Jobs 1 to 5 of ada and bob in turn: DONE, RUNNING, QUEUED, FAILED, QUEUED. */
static void have_jobs(void)
{
    static char *names[] = {"tiny", "hybrid", "tiny-2", "big", "last"};
    static char *workers[] = {"node1-0", "node1-1", "node2-0", "node1-2"};
    static const Ballast__JobState states[] = {
        BALLAST__JOB_STATE__JOB_DONE, BALLAST__JOB_STATE__JOB_RUNNING,
        BALLAST__JOB_STATE__JOB_QUEUED, BALLAST__JOB_STATE__JOB_FAILED,
        BALLAST__JOB_STATE__JOB_QUEUED};
    ballast__job_list_reply__init(&fleet_jobs.reply);
    for (int i = 0; i < N_JOBS; i++) {
        Ballast__Job *j = fleet_jobs.of[i] = &fleet_jobs.jobs[i];
        ballast__job__init(j);
        j->id = (uint64_t)i + 1;
        j->name = names[i];
        j->user = i % 2 ? "bob" : "ada";
        j->state = states[i];
        j->gang_size = (uint32_t)i + 1;
        j->loss = i == 1 ? 2.5 : (double)NAN;
        j->validation_loss = j->imbalance = NAN;
        j->step = 10 * (uint64_t)i;
        j->steps = 100;
        j->submitted_at_ns = 1764424193123000000 + i;
        j->ended_at_ns = i == 0 || i == 3 ? j->submitted_at_ns + 1000000000 : 0;
    }
    fleet_jobs.jobs[1].workers = workers;
    fleet_jobs.jobs[1].n_workers = 4;
    fleet_jobs.jobs[4].priority = 7;
    fleet_jobs.reply.jobs = fleet_jobs.of;
    fleet_jobs.reply.n_jobs = N_JOBS;
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_JOB_LIST, &fleet_jobs.reply.base);
}

static void jobs_are_filtered_sorted_and_cut(void **state)
{
    (void)state;
    static const struct { const char *line, *names; } rows[] = {
        {"jobs", "1\n2\n3\n4\n5\n"},
        {"jobs -f state=QUEUED", "3\n5\n"},
        {"jobs -f state=queued,failed", "3\n4\n5\n"},
        {"jobs -f state!=QUEUED", "1\n2\n4\n"},
        {"jobs -f st=PD -f 'jobid>3'", "5\n"},
        {"jobs -f name~tiny", "1\n3\n"},
        {"jobs -f 'loss<3'", "2\n"},
        {"jobs -f 'workers>=3,user=ada'", "3\n5\n"},
        {"jobs -u bob", "2\n4\n"},
        {"jobs --sort -jobid", "5\n4\n3\n2\n1\n"},
        {"jobs --sort user,-jobid", "5\n3\n1\n4\n2\n"},
        {"jobs --sort loss", "2\n1\n3\n4\n5\n"}, /* what is not known comes last */
        {"jobs --sort -loss", "2\n1\n3\n4\n5\n"},
        {"jobs --sort -step -c 2", "5\n4\n"},
        {"jobs -c 2", "4\n5\n"}, /* the newest */
        {"jobs -a --since 2000-01-01", "1\n2\n3\n4\n5\n"},
        {"jobs --since 1h", "2\n3\n5\n"}, /* those that live, as the others ended long ago */
        {"queue", "5\n3\n"},
        {"queue -u ada -c 1", "5\n"},
    };
    have_jobs();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *line = xasprintf("%s -q -o name", rows[i].line);
        struct result r = run(line);
        if (r.code || strcmp(r.out, rows[i].names))
            fail_msg("%s: exit %d, %s\n%s", line, r.code, r.out, r.err);
        result_fini(&r);
        free(line);
    }
    check("jobs -c 2", 0, "JOBID", "only the last 2 jobs are listed; -c N lists more");
    check("jobs -c 2 --sort jobid", 0, "JOBID", "only the first 2 jobs are listed");
    check("queue", 0, "JOBID  NAME    USER  ST  PRIO  WORKERS", "workers are free");
}

static void columns_are_chosen(void **state)
{
    (void)state;
    have_jobs();
    check("jobs -o jobid,state,workerlist -f jobid=2", 0,
          "JOBID  STATE    WORKERLIST(REASON)\n"
          "    2  RUNNING  node1-[0-2],node2-0\n", "");
    check("jobs -o NAME --no-header -f jobid=2", 0, "hybrid\n", "");
    struct json *v = run_json("jobs --json -f jobid=2,3 -c 1");
    bool truncated = false;
    assert_int_equal(json_count(json_get(v, "items")), 1);
    assert_true(json_as_bool(json_get(json_get(v, "meta"), "truncated"), &truncated));
    assert_true(truncated);
    json_destroy(v);
}

/* What the coordinator can do itself it is told, what only we know is not. */
static void the_coordinator_filters_and_sorts(void **state)
{
    (void)state;
    have_jobs();
    check("jobs -a -u ada -f 'state=DONE,FAILED,loss<3,workers>=2' --sort -submit -c 7 -q", 0,
          NULL, "");
    Ballast__JobListRequest *r = (Ballast__JobListRequest *)last_request(
        BALLAST__METHOD__METHOD_JOB_LIST, &ballast__job_list_request__descriptor);
    assert_int_equal(r->n_terms, 3); /* not the loss */
    assert_string_equal(r->terms[0]->column, "state");
    assert_int_equal(r->terms[0]->n_values, 2);
    assert_string_equal(r->terms[1]->column, "workers");
    assert_int_equal(r->terms[1]->op, BALLAST__LIST_OP__LIST_AT_LEAST);
    assert_string_equal(r->terms[1]->values[0], "2");
    assert_string_equal(r->terms[2]->column, "user");
    assert_int_equal(r->n_order, 0); /* so all of them must come */
    assert_true(r->all_states);
    protobuf_c_message_free_unpacked(&r->base, NULL);

    check("jobs --since 2h --sort -submit,jobid -c 7 -q", 0, NULL, "");
    r = (Ballast__JobListRequest *)last_request(BALLAST__METHOD__METHOD_JOB_LIST,
                                                &ballast__job_list_request__descriptor);
    assert_int_equal(r->n_terms, 1);
    assert_string_equal(r->terms[0]->column, "end");
    assert_int_equal(r->n_order, 2);
    assert_true(r->order[0]->descending);
    assert_int_equal(r->limit, 7);
    assert_true(r->all_states); /* --since means to look back */
    protobuf_c_message_free_unpacked(&r->base, NULL);
}

static void mistakes_name_what_is_allowed(void **state)
{
    (void)state;
    static const struct { const char *line, *err; } rows[] = {
        {"jobs --sort speed", "--sort: 'speed' is not a column of jobs; expected one of jobid, "},
        {"jobs -f state=SLEEPING", "--filter: state: 'SLEEPING' is not one of QUEUED, STARTING, "},
        {"jobs -f loss~2", "--filter: loss is a number or a time; ~ does not go with it"},
        {"jobs -f 'name<x'", "--filter: name is a text; < does not go with it, expected =, != or "
                             "~"},
        {"jobs -f jobid", "--filter: 'jobid' is not a condition; expected COLUMN, one of ="},
        {"jobs -f jobid=x", "--filter: jobid: 'x' is not a number"},
        {"jobs -f 'submit>soon'", "--filter: submit: 'soon' is not a time: 2h (ago), "},
        {"jobs --since tomorrow", "--since: 'tomorrow' is not a time"},
        {"jobs -c 0", "--count: '0' is not a whole number from 1"},
        {"jobs -o jobid,colour", "--output: 'colour' is not a column of jobs"},
        {"events -f --sort time", "--follow prints events as they come"},
        {"metrics 7 --csv -o wide", "exclude each other"},
        {"experts 7 --history --sort imbal", "--history has windows, not layers"},
        {"job show 7 -o wide", "--output: 'wide' is not one of json, yaml, name"},
        {"logs 7 -o yaml", "--output: 'yaml' is not one of json"},
        {"version --address ipc:///x", "--address does not belong to 'version'"},
        {"ping --no-header", "--no-header does not belong to 'ping'"},
        {"workers --since 1h", "--since does not belong to 'workers'"},
        {"worker drain 'w[3-'", "'w[3-' is not a list of names, as in node[01-08,11],login"},
        {"job cancel 7 x", "'x' is not a job id"},
        {"completion tcsh", "'tcsh' is not a shell that is known here; expected one of bash, zsh, "
                            "fish"},
        {"jobs --context nowhere", "'nowhere' is not a context; none is there"},
    };
    fake_forget();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check(rows[i].line, 2, "", rows[i].err);
    assert_int_equal(n_all_requests(), 0);
}

static void events_are_looked_for_in_steps(void **state)
{
    (void)state;
    Ballast__Event e = BALLAST__EVENT__INIT, f = e, *newer[] = {&f}, *older[] = {&e};
    Ballast__EventsReply first = BALLAST__EVENTS_REPLY__INIT, then = first;
    e.seq = 3;
    e.kind = f.kind = "JOB_FAILED";
    f.seq = 90;
    e.text = "the loss is not a number";
    first.events = newer;
    then.events = older;
    first.n_events = then.n_events = 1;
    first.next_seq = then.next_seq = 101;
    first.before_seq = 50; /* it gave up there */
    fake_forget();
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events --filter kind=JOB_FAILED -o name", 0, "3\n90\n", "");
    Ballast__EventsRequest *r = (Ballast__EventsRequest *)last_request(
        BALLAST__METHOD__METHOD_EVENTS, &ballast__events_request__descriptor);
    assert_int_equal(r->before_seq, 50);
    assert_int_equal(r->last, 200); /* one more than is still wanted */
    assert_string_equal(r->terms[0]->column, "kind");
    protobuf_c_message_free_unpacked(&r->base, NULL);
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events --filter 'text~loss' -o seq,text --no-header", 0, "  3  the loss is", "");
    f.kind = "JOB_RUNNING";
    f.has_step = true; /* 0: from the beginning */
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events --filter 'step<5' --json", 0, "\"step\": 0,", "");
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events --filter kind=JOB_FAILED --json", 0, "\"step\": null,", "");
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events -c 1 -o name", 0, "90\n", "only the last 1 events are listed; -c N lists more");
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events -c 2 -o name", 0, "3\n90\n", "");
    then.n_events = 0; /* nothing older is of that kind */
    will_say_then(BALLAST__METHOD__METHOD_EVENTS, &first.base, &then.base);
    check("events -c 1 -o name", 0, "90\n", "");
}

static Ballast__Worker worker(char *name, char *node, Ballast__WorkerState worker_state)
{
    Ballast__Worker w = BALLAST__WORKER__INIT;
    w.name = name;
    w.node = node;
    w.state = worker_state;
    w.job_id = worker_state == BALLAST__WORKER_STATE__WORKER_BUSY ? 7 : 0;
    w.heartbeat_age_ms = 1500;
    return w;
}

static void nodes_are_grouped(void **state)
{
    (void)state;
    Ballast__Worker workers[] = {
        worker("a0", "node01", BALLAST__WORKER_STATE__WORKER_BUSY),
        worker("a1", "node01", BALLAST__WORKER_STATE__WORKER_IDLE),
        worker("b0", "node02", BALLAST__WORKER_STATE__WORKER_IDLE),
        worker("c0", "node03", BALLAST__WORKER_STATE__WORKER_IDLE),
        worker("d0", "node05", BALLAST__WORKER_STATE__WORKER_LOST),
    };
    Ballast__Worker *of[] = {&workers[0], &workers[1], &workers[2], &workers[3], &workers[4]};
    Ballast__WorkerListReply reply = BALLAST__WORKER_LIST_REPLY__INIT;
    Ballast__WorkerReply one = BALLAST__WORKER_REPLY__INIT;
    reply.workers = of;
    reply.n_workers = 5;
    one.worker = &workers[0];
    fake_forget();
    will_say(BALLAST__METHOD__METHOD_WORKER_LIST, &reply.base);
    will_say(BALLAST__METHOD__METHOD_WORKER_DRAIN, &one.base);
    check("nodes", 0, "NODE    STATE  WORKERS(A/I/D/T)  HEALTH    HB  JOB  REASON\n"
          "node01  MIXED           1/1/0/2  well    1.5s  7    -\n", "");
    check("nodes -s", 0, "STATE  NODES  WORKERS(A/I/D/T)  NODELIST\n"
          "IDLE       2           0/2/0/2  node[02-03]\n"
          "LOST       1           0/0/1/1  node05\n", "");
    check("nodes -f 'down>0' -o name", 0, "node05\n", "");
    check("workers -f state=IDLE,job!=7 --sort -name -c 1 -o name", 0, "c0\n",
          "only the first 1 workers are listed");
    check("node drain 'node[01-02]' -o name", 0, "a0\n", "");
    assert_int_equal(n_requests(BALLAST__METHOD__METHOD_WORKER_DRAIN), 3);
    check("worker drain 'a[0-1],b0' --reason x", 0, "a0", "");
    assert_int_equal(n_requests(BALLAST__METHOD__METHOD_WORKER_DRAIN), 6);
    check("node drain node9", 3, "", "there is no node 'node9'; ballast nodes lists them");
    struct json *v = run_json("nodes -s --json");
    assert_int_equal(json_count(json_get(v, "items")), 3);
    json_destroy(v);
}

static void several_jobs_at_once(void **state)
{
    (void)state;
    Ballast__JobReply reply = BALLAST__JOB_REPLY__INIT;
    have_jobs();
    reply.job = &fleet_jobs.jobs[1];
    will_say(BALLAST__METHOD__METHOD_JOB_CANCEL, &reply.base);
    check("cancel 2 3 -o name", 0, "2\n2\n", "");
    assert_int_equal(n_requests(BALLAST__METHOD__METHOD_JOB_CANCEL), 2);
    will_refuse(BALLAST__METHOD__METHOD_JOB_CANCEL, BALLAST__CODE__NOT_FOUND, "NO_JOB", "no job");
    check("job cancel 8 9", 3, "", "ballast: no job\nballast: no job\n");
    check("jobs 8 2 9 -o name", 3, "2\n",
          "ballast: there is no job 8\nballast: there is no job 9\n");
    check("jobs 8", 3, "", "ballast: there is no job 8\n");
    check("jobs 8 -f state=DONE -o name", 0, "", "");
}

/* config.yaml, contexts, variables and flags, in the order in which they count. */
static void a_context_names_a_coordinator(void **state)
{
    (void)state;
    char *command = xasprintf("mkdir -p %s/.config/ballast/contexts && cd %s/.config/ballast && "
                              "printf 'address: ipc:///prod\\nuser: ada\\n' > contexts/prod.yaml &&"
                              " "
                              "printf 'address: ipc:///plain\\ncontext: prod\\n' > config.yaml",
                              fake.folder, fake.folder);
    assert_int_equal(system(command), 0);
    free(command);
    have_jobs();
    check("config contexts", 0, "prod *\n", "");
    check("config show", 0, "address", "");
    check("config show", 0, "(from BALLAST_ADDRESS)", "");
    check("config show --context prod", 0, "ipc:///prod  (from context prod)", "");
    check("config show --context prod --address ipc:///flag", 0, "ipc:///flag  (from --address)",
          "");
    check("ping --context prod --timeout 0.2", 7, "", "no coordinator answers at ipc:///prod");
    check("jobs -o name", 0, "1\n3\n5\n", ""); /* user: ada */
    check("jobs -A -o name", 0, "1\n2\n3\n4\n5\n", "");
    check("jobs -u bob -o name", 0, "2\n4\n", "");
    check("jobs 2 -o name", 0, "2\n", "");
    check("jobs --context ../x", 2, "", "'../x' is not a context; expected one of prod");
    Ballast__PingReply ping = BALLAST__PING_REPLY__INIT;
    ping.user = "bob";
    ping.version = "0";
    will_say(BALLAST__METHOD__METHOD_PING, &ping.base);
    check("jobs --me -o name", 0, "2\n4\n", "");
    check("__complete --context ''", 0, "prod\n", "");
    command = xasprintf("rm -r %s/.config", fake.folder);
    assert_int_equal(system(command), 0);
    free(command);
}

static void shells_are_told_what_may_come(void **state)
{
    (void)state;
    static const struct { const char *line, *out; } rows[] = {
        {"__complete jo", "jobs\tlist jobs: states, and the reason in words\njob\n"},
        {"__complete rebalance ap", "apply\tpropose the plan to the ranks\n"},
        {"__complete jobs --wat", "--watch\tagain every two seconds, until Ctrl-C\n"},
        {"__complete jobs --sort user,-sub", "user,-submit\n"},
        {"__complete jobs --sort=-sub", "--sort=-submit\n"},
        {"__complete jobs -f 'user=ada,sta'", "user=ada,start=\nuser=ada,state=\n"},
        {"__complete jobs -f state=DONE,FA", "state=DONE,FAILED\n"},
        {"__complete jobs -o js", "json\n"},
        {"__complete wait 2 --for=state=RU", "--for=state=RUNNING\n"},
        {"__complete job show 4", "4\tbig, FAILED\n"},
        {"__complete logs -j", ""},
        {"__complete cancel 1 3", "3\ttiny-2, QUEUED\n"},
        {"__complete rebalance auto o", "on\noff\n"},
        {"__complete rebalance auto on 2", "2\thybrid, RUNNING\n"},
        {"__complete worker drain ''", "w0\tIDLE\n"},
        {"__complete node drain w0 n", "n0\n"},
        {"__complete jobs -u b", "bob\n"},
        {"__complete submit ''", ":files\n"},
        {"__complete adapt ''", ":folders\n"},
        {"__complete adapt x --train ''", "full\nlora\n"},
        {"__complete completion z", "zsh\n"},
    };
    Ballast__Worker w = worker("w0", "n0", BALLAST__WORKER_STATE__WORKER_IDLE), *of[] = {&w};
    Ballast__WorkerListReply reply = BALLAST__WORKER_LIST_REPLY__INIT;
    reply.workers = of;
    reply.n_workers = 1;
    have_jobs();
    will_say(BALLAST__METHOD__METHOD_WORKER_LIST, &reply.base);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct result r = run(rows[i].line);
        /* A person who types is not kept waiting for a coordinator that is late. */
        for (int tries = 1; tries < PATIENCE && !*r.out && *rows[i].out; tries++) {
            result_fini(&r);
            r = run(rows[i].line);
        }
        if (r.code || strcmp(r.out, rows[i].out) || *r.err)
            fail_msg("%s: exit %d, '%s' instead of '%s'; %s", rows[i].line, r.code, r.out,
                     rows[i].out, r.err);
        result_fini(&r);
    }
    check("__complete job show --address ipc:///tmp/nobody-here.sock 4", 0, "", "");
}

/* The script in bash itself, which cuts words in its own way. */
static void bash_completes(void **state)
{
    (void)state;
    const char *bin = getenv("BALLAST_BIN");
    static const struct { const char *line, *words; } rows[] = {
        {"jobs --so", "--sort "}, {"jobs -f state=RU", "RUNNING "}, {"job sh", "show "},
        {"wait 2 --for=state=RU", "RUNNING "}, {"jobs --sort=user,-sub", "user,-submit "},
    };
    have_jobs();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *command = xasprintf(
            "cd %s && { ./ballast completion bash; echo 'COMP_LINE=\"./ballast %s\"; "
            "COMP_POINT=${#COMP_LINE}; compopt() { :; }; _ballast; "
            "printf \"%%s \" \"${COMPREPLY[@]}\"'; } | bash", bin ? bin : "build/bin",
            rows[i].line);
        FILE *in = popen(command, "r");
        char got[256] = "";
        assert_non_null(in);
        size_t n = fread(got, 1, sizeof got - 1, in);
        got[n] = '\0';
        assert_int_equal(pclose(in), 0);
        if (strcmp(got, rows[i].words))
            fail_msg("%s: '%s' instead of '%s'", rows[i].line, got, rows[i].words);
        free(command);
    }
}

static void the_manual_is_whole(void **state)
{
    (void)state;
    char *line = xasprintf("__man %s", fake.folder);
    check(line, 0, "", "");
    free(line);
    char *page = xasprintf("%s/ballast-jobs.1", fake.folder), *text = read_back(page);
    assert_non_null(strstr(text, ".SH SYNOPSIS\nballast jobs [ID]... [OPTION]...\n"));
    assert_non_null(strstr(text, "\\-\\-sort COLUMNS\n"));
    assert_non_null(strstr(text, "workerlist"));
    free(text);
    free(page);
    if (access("/usr/bin/groff", X_OK) != 0) {
        print_message("SKIPPED: what groff says of the manual; it is not installed\n");
        return;
    }
    char *command = xasprintf("groff -ww -man -Tutf8 %s/*.1 2>&1 >/dev/null | grep . && exit 1; "
                              "exit 0", fake.folder);
    assert_int_equal(system(command), 0);
    free(command);
}

/* The manual's page of commands names each of them. */
static void docs_know_every_command(void **state)
{
    (void)state;
    const char *source = getenv("BALLAST_SOURCE");
    char *page = xasprintf("%s/docs/cli.md", source ? source : "."), *text = read_back(page);
    struct result r = run("__complete ''");
    for (char *save, *l = strtok_r(r.out, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
        char *name = xasprintf("ballast %.*s", (int)strcspn(l, "\t"), l);
        if (!strstr(text, name))
            fail_msg("docs/cli.md does not know '%s'", name);
        free(name);
    }
    result_fini(&r);
    free(text);
    free(page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_are_filtered_sorted_and_cut),
        cmocka_unit_test(columns_are_chosen),
        cmocka_unit_test(the_coordinator_filters_and_sorts),
        cmocka_unit_test(mistakes_name_what_is_allowed),
        cmocka_unit_test(events_are_looked_for_in_steps),
        cmocka_unit_test(nodes_are_grouped),
        cmocka_unit_test(several_jobs_at_once),
        cmocka_unit_test(a_context_names_a_coordinator),
        cmocka_unit_test(shells_are_told_what_may_come),
        cmocka_unit_test(bash_completes),
        cmocka_unit_test(the_manual_is_whole),
        cmocka_unit_test(docs_know_every_command),
    };
    return cmocka_run_group_tests(tests, fake_start, fake_stop);
}
