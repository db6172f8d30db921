/* ctl.c - `ballast`: the table of commands */
#include "coordinator/ctl_list.h"

#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/stdio.h"

const struct ctl_command ctl_commands[] = {
    {"submit", "JOB.yaml", 0, 1, "sdk0wfx@", CTL_NAMED,
     "check a job file and submit it; prints the job's id",
     "The file is checked before anything is contacted; with a mistake nothing is submitted.\n"
     "\n"
     "  ballast submit job.yaml\n"
     "  ballast submit job.yaml --set train.steps=1000 --set train.optimizer.lr=1e-3\n"
     "  ballast submit job.yaml --dry-run      data, groups, memory, time; what would be refused\n"
     "  ballast submit job.yaml --follow       live progress; Ctrl-C detaches\n"
     "  ballast submit job.yaml --wait         exit code of the job\n"
     "  ballast submit job.yaml --hold         starts once it is released: ballast job release\n"
     "  ballast submit --explain               every key of a job file\n", ctl_submit, NULL},
    {"jobs", "[ID]...", 0, LIST_TERMS_MAX, "a6u87c45HE@", CTL_LISTS,
     "list jobs: states, and the reason in words",
     "Lists the jobs that have not ended; -a lists all, --since those that live or have ended\n"
     "since then. Of more than -c (1000) the newest are shown, or the first by --sort.\n"
     "\n"
     "  ballast jobs\n"
     "  ballast jobs 7 8                       these, ended or not\n"
     "  ballast jobs -a -o wide\n"
     "  ballast jobs --me --since 2d -f state=FAILED,CANCELLED\n"
     "  ballast jobs -a --sort -time -c 10 -o jobid,name,user,time,workerlist\n"
     "  ballast jobs -f 'workers>=8,loss<2.5' -w\n"
     "  ballast jobs --json | jq '.items[].state'\n", ctl_jobs, &ctl_job_list},
    {"queue", "", 0, 0, "6u87c45HE@", CTL_LISTS,
     "the jobs that wait, in the order in which they start, and why they wait",
     "The order is by priority, then first come; a job that fits may start beside one that waits\n"
     "for workers that nobody has. Held jobs come last.\n"
     "\n"
     "  ballast queue\n"
     "  ballast queue -u ada -o jobid,wait,reason\n", ctl_queue, &ctl_queue_list},
    {"job show", "ID", 1, 1, "@", CTL_NAMED,
     "one job in full, with its newest events",
     "  ballast job show 7\n"
     "  ballast job show 7 -o yaml\n", ctl_job_show, NULL},
    {"job cancel", "ID...", 1, 1000, "rH@", CTL_LISTS,
     "stop a job for good; asking twice is fine",
     "  ballast job cancel 7 --reason 'wrong data'\n"
     "  ballast job cancel $(ballast jobs --me -f st=PD -o name)\n", ctl_job_cancel, &ctl_job_list},
    {"job hold", "ID...", 1, 1000, "rH@", CTL_LISTS,
     "keep a job that waits from starting",
     "It keeps its place in the queue; its reason says who holds it. What runs can be paused.\n"
     "\n"
     "  ballast job hold 7 --reason 'after the weekend'\n", ctl_job_hold, &ctl_job_list},
    {"job release", "ID...", 1, 1000, "H@", CTL_LISTS,
     "let a held job start",
     "  ballast job release 7\n", ctl_job_release, &ctl_job_list},
    {"job requeue", "ID...", 1, 1000, "rH@", CTL_LISTS,
     "queue a job again, to start from its newest checkpoint",
     "The ranks of a running job finish their step, write a checkpoint and end; then it waits for\n"
     "workers again, which may be others, under the same id. A job that has ended is queued anew,\n"
     "with its restarts and its time limit counted from 0.\n"
     "\n"
     "  ballast worker drain node3-0 && ballast job requeue 7 --reason 'off that node'\n"
     "  ballast job requeue $(ballast jobs -a --me --since 1d -f state=FAILED -o name)\n",
     ctl_job_requeue, &ctl_job_list},
    {"job pause", "ID...", 1, 1000, "rH@", CTL_LISTS,
     "let a job give its workers back, keeping its place",
     "Its ranks finish their step, write a checkpoint and end. Others may use the workers\n"
     "meanwhile; resume queues the job again, and it goes on from that checkpoint.\n"
     "\n"
     "  ballast job pause 7 --reason 'maintenance'\n"
     "  ballast wait 7 --for=state=PAUSED\n", ctl_job_pause, &ctl_job_list},
    {"job resume", "ID...", 1, 1000, "rH@", CTL_LISTS,
     "let a paused job go on from its checkpoint",
     "  ballast job resume 7\n", ctl_job_resume, &ctl_job_list},
    {"job set", "ID KEY=VALUE...", 2, 33, "H@", CTL_LISTS,
     "change settings of a job that has not ended",
     "All ranks of a running job take them at one step. Keys of the job file that can be changed:\n"
     "checkpoint.every_steps, checkpoint.keep, train.validation_every_steps,\n"
     "rebalance.window_steps, rebalance.horizon_steps, rebalance.min_gain,\n"
     "rebalance.boundary_mib, rebalance.layer_moves,\n"
     "scheduling.time_limit, scheduling.max_restarts, scheduling.priority.\n"
     "\n"
     "  ballast job set 7 checkpoint.every_steps=50\n"
     "  ballast job set 7 scheduling.time_limit=12h scheduling.max_restarts=10\n", ctl_job_set,
     &ctl_job_list},
    {"cancel", "ID...", 1, 1000, "rH@", CTL_LISTS, "the same as job cancel",
     "  ballast cancel 7 8\n", ctl_job_cancel, &ctl_job_list},
    {"wait", "ID...", 1, 1000, "Fi@", CTL_VALUES,
     "wait until jobs have ended or have reached a state",
     "Without --for the exit code is the job's: 0, 1, or 128+n if signal n ended it; with it\n"
     "0, or 1 if the job will not come to that state. Of several jobs it is the first in their\n"
     "order that is not 0. 124 says that --timeout ran out.\n"
     "\n"
     "With --any the first job that gets there ends the wait: its id is printed, and the exit\n"
     "code is this job's.\n"
     "\n"
     "  ballast wait 7\n"
     "  ballast wait 7 --for=state=RUNNING --timeout 60\n"
     "  ballast wait 7 8 9                     all of them\n"
     "  ballast wait --any 7 8 9               prints which\n", ctl_wait, NULL},
    {"logs", "ID", 1, 1, "Rfz@", CTL_LINES,
     "what ranks' trainers printed, over all attempts",
     "Of rank 0, unless --rank says of which. Of all ranks each line has its rank in front; they\n"
     "are in the order in which the coordinator got them, to a quarter of a second.\n"
     "\n"
     "  ballast logs 7\n"
     "  ballast logs 7 --tail 20\n"
     "  ballast logs 7 --rank 3 -f\n"
     "  ballast logs 7 --rank all --tail 50\n", ctl_logs, NULL},
    {"events", "", 0, 0, "jf6c45H@", CTL_LISTS,
     "what happened, in order",
     "Of more than -c (200) the newest are shown.\n"
     "\n"
     "  ballast events --job 7\n"
     "  ballast events --since 1h --filter kind=WORKER_LOST,WORKER_SUSPECT\n"
     "  ballast events -f --filter 'text~not a number'\n", ctl_events, &ctl_event_list},
    {"metrics", "ID", 1, 1, "fpCPc645H@", CTL_LISTS,
     "loss, tokens/s and more, a line per step",
     "Of more than -c (10000) the newest are shown; --csv, --plot and -f have all.\n"
     "\n"
     "  ballast metrics 7\n"
     "  ballast metrics 7 -c 20 -o step,loss,mfu,time\n"
     "  ballast metrics 7 --since 10m --sort -loss -c 5\n"
     "  ballast metrics 7 -f --phases\n"
     "  ballast metrics 7 --csv > run.csv\n"
     "  ballast metrics 7 --plot               draws the loss in the terminal (gnuplot)\n",
     ctl_metrics, &ctl_step_list},
    {"data", "ID", 1, 1, "bc45H@", CTL_LISTS,
     "what a job reads: files, tokens, epochs; with --step which documents",
     "With --step a line for each document of each sequence that the step's ranks read: its number\n"
     "in its file (DOC, from 0) or its line, the byte there, how many of its tokens from which one\n"
     "on (FROM, from 0), and how many labels they had. The order is that of the trainers, by the\n"
     "number of the first sequence that each step reported; a step to come is listed, too.\n"
     "\n"
     "The files are read here, so they must be seen from here; in large ones of JSON lines\n"
     "(without --step) and of tokens that may be none only the beginning is looked at.\n"
     "\n"
     "  ballast data 7\n"
     "  ballast data 7 --step 1200\n"
     "  ballast data 7 --step 1198..1202 -f rank=3 -o step,file,line\n"
     "  ballast data 7 --step 1200 --sort labels -c 5\n"
     "  ballast data 7 --step 1200 --json | jq -r '.items[] | \"\\(.file):\\(.line)\"'\n",
     ctl_data, &ctl_read_list},
    {"workers", "", 0, 0, "c45HE@", CTL_LISTS,
     "the fleet: states, heartbeats and what runs where",
     "  ballast workers\n"
     "  ballast workers -f state=LOST,SICK,DRAINED -o name,reason\n"
     "  ballast workers -o wide --sort -temp\n"
     "  ballast workers --json\n", ctl_workers, &ctl_worker_list},
    {"worker show", "WORKER", 1, 1, "@", CTL_NAMED,
     "one worker, and the health of its GPU",
     "  ballast worker show node3-0\n", ctl_worker_show, NULL},
    {"worker drain", "WORKER...", 1, 1000, "rH@", CTL_LISTS,
     "give a worker no new work",
     "Names may be lists, as Slurm writes them.\n"
     "\n"
     "  ballast worker drain node3-0 --reason 'fan is loud'\n"
     "  ballast worker drain 'node3-[0-7]' node4-0\n", ctl_worker_drain, &ctl_worker_list},
    {"worker resume", "WORKER...", 1, 1000, "rH@", CTL_LISTS,
     "give a drained worker work again",
     "  ballast worker resume node3-0\n", ctl_worker_resume, &ctl_worker_list},
    {"nodes", "", 0, 0, "9c45HE@", CTL_LISTS, "the fleet by nodes, or by states as sinfo has it",
     "A/I/D/T: workers that are busy (allocated), idle, down (late, lost, drained, sick), all.\n"
     "\n"
     "  ballast nodes\n"
     "  ballast nodes -s\n"
     "  ballast nodes -f 'down>0' -o node,state,reason\n", ctl_nodes, &ctl_node_list},
    {"node drain", "NODE...", 1, 1000, "rH@", CTL_LISTS, "give all workers of a node no new work",
     "  ballast node drain 'node[3-5]' --reason 'new switch'\n", ctl_node_drain, &ctl_worker_list},
    {"node resume", "NODE...", 1, 1000, "rH@", CTL_LISTS, "give all workers of a node work again",
     "  ballast node resume node3\n", ctl_node_resume, &ctl_worker_list},
    {"experts", "ID", 1, 1, "lWmycP45H@", CTL_LISTS,
     "tokens per expert and layer: hot and cold ones, a heat map",
     "IMBAL is the most loaded expert over the mean; DEVICES the same of devices, as experts are\n"
     "placed at present. On a terminal a heat map comes first.\n"
     "\n"
     "With --history a line per stored window: the imbalance of experts, which the router's bias\n"
     "and auxiliary loss are to lower, beside that of devices under the placement of that time;\n"
     "over layers the mean and the worst (its layer), and what the ranks measured step by step.\n"
     "--plot draws both over time, --heatmap the load of each device; -c N: the newest N windows\n"
     "(60, at most 200).\n"
     "\n"
     "  ballast experts 7\n"
     "  ballast experts 7 --window all --layer 3\n"
     "  ballast experts 7 --sort -imbal -c 5\n"
     "  ballast experts 7 --heatmap | less -R\n"
     "  ballast experts 7 --history --window all --layer 3\n"
     "  ballast experts 7 --json | jq '.items[].imbalance'\n", ctl_experts, &ctl_layer_list},
    {"placement", "ID", 1, 1, "leOH@", CTL_VALUES,
     "which expert is in which slot, and what moved before",
     "  ballast placement 7\n"
     "  ballast placement 7 --epoch 0          where it began\n"
     "  ballast placement 7 --layer 3 --json\n"
     "  ballast placement 7 --epoch 4 --placement-out p.csv   to go back there: rebalance apply\n",
     ctl_placement, NULL},
    {"rebalance plan", "ID", 1, 1, "H@", CTL_VALUES,
     "every move that would pay, its bytes, gain and cost",
     "Exit code 10: there is something to do; 0: nothing.\n"
     "\n"
     "  ballast rebalance plan 7\n"
     "  ballast rebalance plan 7 --json | jq .revision\n", ctl_rebalance_plan, NULL},
    {"rebalance apply", "ID", 1, 1, "vI@", CTL_VALUES,
     "propose the plan to the ranks",
     "With --revision it is refused (5) if loads or placement moved on since the plan was shown.\n"
     "With --placement the ranks go to that placement, whatever the planner thinks of it: all\n"
     "layers, or those that the file names.\n"
     "\n"
     "  ballast rebalance apply 7 --revision 12\n"
     "  ballast rebalance apply 7 --placement p.csv   as `placement` or `balance` writes it\n",
     ctl_rebalance_apply, NULL},
    {"rebalance history", "ID", 1, 1, "6c45H@", CTL_LISTS,
     "plans and what became of them, imbalance and gain",
     "  ballast rebalance history 7\n"
     "  ballast rebalance history 7 --since 1d -f state=DONE --sort -gain/step\n",
     ctl_rebalance_history, &ctl_history_list},
    {"rebalance auto", "on|off ID", 2, 2, "@", CTL_VALUES,
     "let the coordinator move experts by itself, or not",
     "  ballast rebalance auto off 7\n", ctl_rebalance_auto, NULL},
    {"db query", "\"SELECT ...\"", 1, 1, "cCH@", CTL_VALUES,
     "read-only SQL over what the coordinator stores",
     "Tables: jobs, attempts, events, workers, plans, placements, steps, load_windows, and\n"
     "expert_load, one row per job, layer, window and expert. SELECT * FROM table LIMIT 0 shows\n"
     "the columns. Windows do not overlap: older ones are longer (seconds), so tokens add up.\n"
     "A query may take 2 s, and gives 1000 rows unless -c asks for more.\n"
     "\n"
     "  ballast db query \"SELECT id, name, state FROM jobs ORDER BY id DESC LIMIT 5\"\n"
     "  ballast db query \"SELECT layer, expert, sum(tokens) AS tokens FROM expert_load\n"
     "      WHERE job = 7 GROUP BY layer, expert ORDER BY tokens DESC LIMIT 10\"\n"
     "  ballast db query --csv -c 100000 \"SELECT * FROM steps WHERE job = 7\" > steps.csv\n",
     ctl_db_query, NULL},
    {"db backup", "FILE", 1, 1, "@", CTL_VALUES,
     "a consistent copy of jobs, events and placements",
     "The coordinator writes it on its own machine while it goes on, checks it and gives it its\n"
     "name last. Curves and expert load (stats.db) are not in it.\n"
     "\n"
     "  ballast db backup /backups/ballast-monday.db\n", ctl_db_backup, NULL},
    {"top", "", 0, 0, "1@", CTL_NO_FORMS,
     "a live screen: jobs, queue, workers, imbalance, last moves",
     "q quits. Without a terminal one page is printed, as with --once.\n"
     "\n"
     "  ballast top\n"
     "  ballast top --once\n", ctl_top, NULL},
    {"balance", "", 0, 0, "LgGMSBOH", CTL_VALUES,
     "place experts for loads in a file; needs no coordinator",
     "Without a column 'window' the loads are balanced as they are. With one they are a history:\n"
     "each window is planned from what came before and scored on the next, with its shares fixed\n"
     "and split anew. With --previous the placement in force stays unless moving pays.\n"
     "FILE may also be a trace of Megatron's routers or tokens per expert (a file of JSON lines,\n"
     "or the folder with those of all ranks), vLLM's load statistics, or a dump of SGLang's\n"
     "recorder.\n"
     "\n"
     "  ballast balance --loads loads.csv --devices 32\n"
     "  ballast balance --loads tokens_per_expert/ --window-steps 20 --devices 32\n"
     "  ballast balance --loads loads.csv --devices 64 --nodes 8 --json\n"
     "  ballast balance --loads loads.csv --devices 8 --placement-out placement.csv\n"
     "  ballast balance --loads new.csv --devices 8 --previous placement.csv\n", ctl_balance, NULL},
    {"adapt", "MODEL_DIR", 1, 1, "kTnDXZ", CTL_VALUES,
     "from a model's folder to a plan and a job",
     "Reads config.json and, where there are any, the tensors' headers or a list of them\n"
     "(tensors.tsv); counts, maps every operator, searches for the fastest way to train on the\n"
     "cluster, and with --out writes job.yaml, cluster.yaml, launch files and REPORT.md; what is\n"
     "there with other content stays, and the command says so, unless --force. Needs no\n"
     "coordinator. With --validate ballast-worker checks a shrunk model of the same structure\n"
     "(layouts, gradients, a loss that falls, time against the prediction); exit code 1 if one\n"
     "fails. Exit code 6: nothing fits the machines of --cluster.\n"
     "\n"
     "  ballast adapt models/new-one\n"
     "  ballast adapt models/new-one --cluster cluster.yaml --train lora --out adapted\n"
     "  ballast adapt models/new-one --validate\n"
     "  ballast adapt models/new-one --sequence-length 1048576 --json | jq '.plans[0]'\n",
     ctl_adapt, NULL},
    {"keygen", "NAME", 1, 1, "UD", CTL_VALUES,
     "make a key for a person, a worker or a coordinator",
     "Writes NAME.key, which its holder keeps to himself (mode 0600), and NAME.pub, whose line\n"
     "the coordinator's authorized_keys must have. Nothing is written over.\n"
     "\n"
     "  ballast keygen ada --out ~/.config/ballast\n"
     "  ballast keygen node7 --role worker\n"
     "  ballast keygen coordinator --role coordinator --out /etc/ballast\n", ctl_keygen, NULL},
    {"ping", "", 0, 0, "@", CTL_VALUES,
     "is the coordinator there, and which",
     "  ballast ping\n"
     "  ballast ping --address tcp://127.0.0.1:7070\n", ctl_ping, NULL},
    {"doctor", "", 0, 0, "@", CTL_VALUES,
     "one screen: what is up, what is wrong, what to type next",
     "  ballast doctor\n", ctl_doctor, NULL},
    {"config show", "", 0, 0, "@", CTL_VALUES, "which coordinator, key and user, and who says so",
     "Each is a flag, else what --context has, else a variable, else what the context of\n"
     "BALLAST_CONTEXT or config.yaml has, else config.yaml itself.\n"
     "\n"
     "  ballast config show\n"
     "  ballast config show --context prod --json\n", ctl_config_show, NULL},
    {"config contexts", "", 0, 0, "", CTL_NAMED, "the coordinators that have a name here",
     "A context is a file ~/.config/ballast/contexts/NAME.yaml with the keys of config.yaml:\n"
     "address, key, coordinator_key, user. An asterisk marks the one that is used.\n"
     "\n"
     "  ballast config contexts\n"
     "  ballast --context prod jobs\n", ctl_config_contexts, NULL},
    {"completion", "bash|zsh|fish", 1, 1, "", CTL_NO_FORMS,
     "what lets a shell complete this program",
     "Tab then completes commands, options and their values, and asks the coordinator, for at\n"
     "most half a second, for job ids, workers, nodes and users.\n"
     "\n"
     "  ballast completion bash > ~/.local/share/bash-completion/completions/ballast\n"
     "  ballast completion zsh > ~/.zfunc/_ballast      where fpath has it\n"
     "  ballast completion fish > ~/.config/fish/completions/ballast.fish\n", ctl_completion, NULL},
    {"version", "", 0, 0, "", CTL_VALUES,
     "versions of this program and its libraries",
     "  ballast version\n", ctl_version, NULL},
    {"help", "[COMMAND]", 0, 2, "", CTL_NO_FORMS,
     "more about a command, or a group of them; the same as --help",
     "  ballast help submit\n"
     "  ballast help job                       what can be done with a job\n"
     "  ballast help job cancel\n", ctl_help, NULL},
};
const size_t ctl_n_commands = sizeof ctl_commands / sizeof *ctl_commands;

/* A list again and again, until Ctrl-C; on a terminal in its place. */
static int watch(struct ctl *c, const struct ctl_command *command)
{
    int code;
    ctl_catch_interrupt();
    do {
        if (isatty(STDOUT_FILENO))
            fputs("\033[H\033[2J", stdout);
        code = command->run(c);
        fflush(stdout);
        arena_reset(&c->arena);
        for (int i = 0; i < 40 && !ctl_interrupts; i++)
            nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
    } while (code == CTL_OK && !ctl_interrupts);
    return ctl_interrupts ? ctl_detached(c, CTL_SIGNAL + SIGINT, "nothing was changed") : code;
}

/* Not for people: what shells and the build ask for. -1: it is none of that. */
static int run_hidden(int argc, char **argv, struct ctl *c)
{
    if (argc >= 2 && !strcmp(argv[1], "__complete"))
        return ctl_complete(c, argv + 2, (size_t)argc - 2);
    if (argc >= 3 && !strcmp(argv[1], "__man"))
        return ctl_man(argv[2], argv + 3, (size_t)argc - 3);
    return -1;
}

int main(int argc, char **argv)
{
    struct ctl c = {0};
    const struct ctl_command *command;
    stdio_hold_places();
    setlocale(LC_CTYPE, "C.UTF-8");
    int code = run_hidden(argc, argv, &c);
    if (code < 0)
        code = ctl_parse(argc, argv, &c, &command);
    if (code < 0)
        code = c.watch ? watch(&c, command) : command->run(&c);
    ctl_disconnect(&c);
    arena_fini(&c.arena);
    free(c.args);
    free(c.sets);
    free(c.filters);
    if (fflush(stdout) != 0 || ferror(stdout)) { /* a full disk: the data did not arrive */
        int error = errno;
        code = code == CTL_OK ? (int)ctl_fail(&c, CTL_FAILED, "what is printed cannot be written: "
                                              "%s", strerror(error)) : code;
    }
    return code;
}
