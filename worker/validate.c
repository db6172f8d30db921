/* validate.c - the command `ballast-worker validate` */
#include "worker/validate.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/field_text.h"
#include "common/hf_config.h"
#include "common/mem.h"
#include "common/usage.h"

static const char usage[] =
    "usage: ballast-worker validate MODEL_DIR --expect FIXTURE_DIR|--self [--steps N]\n"
    "           [--device cpu|cuda:N] [--dtype f32|bf16] [--dump DIR] [--lora ADAPTER_DIR]\n"
    "           [--layout ranks=4,fsdp=2,ep=4,expert_shard=1]\n"
    "           [--moves-every N] [--seed S] [--deterministic] [--recompute off|selective|full]\n"
    "\n"
    "Runs the model on the fixture's tokens and compares logits, loss, gradients and the loss\n"
    "curve with what the fixture expects; where it trains an adapter, that one's curve and end,\n"
    "too. Exit code 1: something is above its tolerance.\n"
    "\n"
    "  --self        without a fixture: weights from a seed, one rank against others, gradients\n"
    "                against finite differences, a loss that falls; 20 steps unless said\n"
    "  --json        with --self: an object a line\n"
    "  --speed       with --self: the time of a step alone, of 4 sequences of 256 tokens\n"
    "  --steps N     optimizer steps of the curve to run; default: all\n"
    "  --device D    cpu or cuda:N, which all ranks share; default: cpu\n"
    "  --dtype T     of activations and of the weights that they meet: f32, or bf16 on a GPU;\n"
    "                default: f32\n"
    "  --layout L    run sharded over ranks of this process: ranks, fsdp, ep, expert_shard\n"
    "  --lora DIR    the PEFT folder that training of an adapter begins from; default: lora-start\n"
    "                of the fixture, where it has one\n"
    "  --dump DIR    write logits.safetensors, gradients.safetensors, report.json and, where one\n"
    "                is trained, the adapter as lora-end/ there\n"
    "  --moves-every N   go to a random placement of experts, homes and copies, every N steps of\n"
    "                    the curve, each rank with one spare slot; default: 0, never\n"
    "  --seed S          of the placements; default: 1\n"
    "  --deterministic   moves change no bit: the digest of all weights and optimizer state, and\n"
    "                    every loss, are those of a run without\n"
    "  --recompute WAY   what a backward makes again, as parallel.activation_checkpointing; with\n"
    "                    --deterministic it changes no bit; default: off\n";

#define SELF_STEPS     20
#define SELF_STEPS_MAX 10000

struct options {
    const char *model, *expect, *dump, *device, *lora;
    enum elem_type elem;
    struct layout_degrees degrees;
    struct validation_moves moves;
    bool deterministic, self, json, speed;
    enum recompute recompute;
    int64_t n_steps; /* -1: all */
};

/* ---- options -------------------------------------------------------------------------------- */

static int parse_layout(char *text, struct layout_degrees *d, struct err *err)
{
    char *save = NULL;

    for (char *part = strtok_r(text, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        char *value = strchr(part, '=');
        uint64_t x;
        if (value)
            *value++ = '\0';
        if (!value || !text_count(value, 1, RANKS_MAX, &x))
            return err_set(err, -EINVAL, "--layout: '%s' needs a number from 1 to %u", part,
                           RANKS_MAX);
        if (strcmp(part, "ranks") == 0)
            d->world = (uint32_t)x;
        else if (strcmp(part, "fsdp") == 0)
            d->fsdp = (uint32_t)x;
        else if (strcmp(part, "ep") == 0)
            d->ep = (uint32_t)x;
        else if (strcmp(part, "expert_shard") == 0)
            d->expert_shard = (uint32_t)x;
        else if (strcmp(part, "sp") == 0 && x != 1)
            return err_set(err, -EINVAL, "--layout: sp %" PRIu64 " is not supported; supported: 1",
                           x);
        else if (strcmp(part, "sp") != 0)
            return err_set(err, -EINVAL,
                           "--layout: '%s' is unknown; known: ranks, fsdp, ep, expert_shard, sp",
                           part);
    }
    return 0;
}

static int parse_dtype(const char *value, enum elem_type *out, struct err *err)
{
    if (strcmp(value, "f32") != 0 && strcmp(value, "bf16") != 0)
        return err_set(err, -EINVAL, "--dtype '%s' is not supported; supported: f32, bf16", value);
    *out = strcmp(value, "bf16") == 0 ? ELEM_BF16 : ELEM_F32;
    return 0;
}

enum {
    OPTION_EXPECT = 256, OPTION_STEPS, OPTION_DEVICE, OPTION_DTYPE, OPTION_LAYOUT, OPTION_DUMP,
    OPTION_LORA, OPTION_MOVES_EVERY, OPTION_SEED, OPTION_DETERMINISTIC, OPTION_RECOMPUTE,
    OPTION_SELF, OPTION_JSON, OPTION_SPEED
};

static int parse_recompute(const char *value, enum recompute *out, struct err *err)
{
    *out = recompute_of(value);
    if (strcmp(value, recompute_words[*out]) != 0)
        return err_set(err, -EINVAL, "--recompute '%s' is unknown; known: off, selective, full",
                       value);
    return 0;
}

static int parse_option(int which, char *value, struct options *o, struct err *err)
{
    uint64_t n;

    switch (which) {
    case OPTION_EXPECT: o->expect = value; return 0;
    case OPTION_DUMP: o->dump = value; return 0;
    case OPTION_DEVICE: o->device = value; return device_check(value, err);
    case OPTION_DTYPE: return parse_dtype(value, &o->elem, err);
    case OPTION_RECOMPUTE: return parse_recompute(value, &o->recompute, err);
    case OPTION_LORA: o->lora = value; return 0;
    case OPTION_LAYOUT: return parse_layout(value, &o->degrees, err);
    case OPTION_STEPS:
        if (!text_count(value, 0, INT32_MAX, &n))
            return err_set(err, -EINVAL, "--steps '%s' is not a number of steps", value);
        o->n_steps = (int64_t)n;
        return 0;
    case OPTION_MOVES_EVERY:
        if (!text_count(value, 0, INT32_MAX, &n))
            return err_set(err, -EINVAL, "--moves-every '%s' is not a number of steps", value);
        o->moves.every = (uint32_t)n;
        return 0;
    case OPTION_SEED:
        if (!text_count(value, 0, INT32_MAX, &n))
            return err_set(err, -EINVAL, "--seed '%s' is not a number", value);
        o->moves.seed = n;
        return 0;
    case OPTION_SELF: o->self = true; return 0;
    case OPTION_JSON: o->json = true; return 0;
    case OPTION_SPEED: o->speed = true; return 0;
    case OPTION_DETERMINISTIC:
        o->deterministic = true;
        return 0;
    default:
        return err_set(err, -EINVAL, "an unknown option, or one without its value");
    }
}

/* 1: help was asked for. */
static int parse_options(int argc, char **argv, struct options *o, struct err *err)
{
    static const struct option known[] = {
        { "expect", required_argument, NULL, OPTION_EXPECT },
        { "steps", required_argument, NULL, OPTION_STEPS },
        { "device", required_argument, NULL, OPTION_DEVICE },
        { "dtype", required_argument, NULL, OPTION_DTYPE },
        { "layout", required_argument, NULL, OPTION_LAYOUT },
        { "dump", required_argument, NULL, OPTION_DUMP },
        { "lora", required_argument, NULL, OPTION_LORA },
        { "moves-every", required_argument, NULL, OPTION_MOVES_EVERY },
        { "seed", required_argument, NULL, OPTION_SEED },
        { "deterministic", no_argument, NULL, OPTION_DETERMINISTIC },
        { "self", no_argument, NULL, OPTION_SELF },
        { "json", no_argument, NULL, OPTION_JSON },
        { "speed", no_argument, NULL, OPTION_SPEED },
        { "recompute", required_argument, NULL, OPTION_RECOMPUTE },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    int which;

    *o = (struct options){ .degrees = { 1, 1, 1, 0 }, .n_steps = -1, .moves = { .seed = 1 } };
    optind = 0; /* GNU: start over; the program has read its own options before */
    opterr = 0;
    while ((which = getopt_long(argc, argv, "h", known, NULL)) != -1) {
        if (which == 'h')
            return 1;
        int rc = parse_option(which, optarg, o, err);
        if (rc < 0)
            return rc;
    }
    if (argc - optind != 1)
        return err_set(err, -EINVAL, "expected one MODEL_DIR, got %d", argc - optind);
    if (!o->expect && !o->self)
        return err_set(err, -EINVAL, "--expect FIXTURE_DIR is missing, or --self");
    if (o->expect && o->self)
        return err_set(err, -EINVAL, "--self takes no --expect");
    o->model = argv[optind];
    return 0;
}

/* ---- the command ---------------------------------------------------------------------------- */

static void print_moves(const struct validation *v)
{
    if (v->n_migrations > 0)
        printf("%u migrations, %.2f MiB and %.2f ms each, a step takes %.2f ms\n", v->n_migrations,
               (double)v->moved_bytes / v->n_migrations / (1 << 20),
               1e3 * v->pause_s / v->n_migrations, 1e3 * v->step_s / v->n_steps);
    if (v->fixture->n_curves)
        printf("digest of weights and state after the curve: %016llx\n",
               (unsigned long long)v->digest);
}

/* 0: within tolerance, 1: not. */
static int validate(const struct options *o, const struct model_spec *spec,
                    const struct tensor_map *map, const struct fixture *f, struct err *err)
{
    struct stack_config config = {
        .spec = spec, .map = map, .degrees = o->degrees, .device = o->device, .elem = o->elem,
        .n_spare = o->moves.every > 0 ? 1 : 0, .deterministic = o->deterministic,
        .tokens_max = validation_tokens_max(f), .recompute = o->recompute,
    };
    uint32_t n_steps = o->n_steps < 0 || o->n_steps > f->n_steps ? f->n_steps
                                                                 : (uint32_t)o->n_steps;
    const char *adapter = o->lora ? o->lora : f->lora_start;
    struct verdict verdict;
    struct validation v;

    if (o->lora && !f->lora.losses)
        return err_set(err, -EINVAL, "--lora: the fixture at %s trains no adapter", o->expect);
    int rc = validation_run(&config, o->model, f, n_steps, o->moves, 0, &v, err);
    if (rc < 0)
        return rc;
    if (adapter && n_steps)
        rc = validation_lora(&config, adapter, &v, err);
    if (rc == 0 && o->elem == ELEM_BF16)
        rc = validation_add_rounded(&config, n_steps ? adapter : NULL, &v, err);
    if (rc == 0)
        rc = verdict_of(&v, map, &verdict, err);
    if (rc == 0 && o->dump)
        rc = validation_dump(o->dump, &v, spec, map, &verdict, err);
    if (rc == 0) {
        verdict_print(&verdict);
        print_moves(&v);
    }
    validation_fini(&v, map);
    if (rc < 0)
        return rc;
    return verdict.is_met ? 0 : 1;
}

static int check_self(const struct options *o, const struct model_spec *spec,
                      const struct tensor_map *map, struct err *err)
{
    struct stack_config config = {.spec = spec, .map = map, .device = o->device, .elem = ELEM_F32};
    int64_t n_steps = o->n_steps < 0 ? SELF_STEPS : o->n_steps;
    bool passed = false;
    if (n_steps < 1 || n_steps > SELF_STEPS_MAX)
        return err_set(err, -EINVAL, "--steps: --self takes 1 to %d", SELF_STEPS_MAX);
    if (o->speed)
        return validation_speed(&config, o->json, stdout, err);
    int rc = validation_self(&config, (uint32_t)n_steps, o->json, stdout, &passed, err);
    return rc < 0 ? rc : passed ? 0 : 1;
}

static int run(const struct options *o, struct err *err)
{
    struct tensor_map map = {0};
    struct fixture fixture = {0};
    struct model_spec *spec = xcalloc(1, sizeof *spec);
    int rc;

    if ((rc = hf_config_read(o->model, spec, err)) == 0 &&
        (rc = tensor_map_init(spec, &map, err)) == 0 && o->self)
        rc = check_self(o, spec, &map, err);
    else if (rc == 0 && (rc = fixture_open(o->expect, spec, &fixture, err)) == 0)
        rc = validate(o, spec, &map, &fixture, err);
    fixture_close(&fixture);
    tensor_map_fini(&map);
    free(spec);
    return rc;
}

int validate_main(int argc, char **argv)
{
    struct options o;
    struct err err = {0};
    int rc = parse_options(argc, argv, &o, &err);

    if (rc == 1) {
        fputs(usage, stdout);
        return 0;
    }
    if (rc < 0)
        return usage_error("ballast-worker validate", "%s", err.text);
    rc = run(&o, &err);
    if (rc < 0) {
        fprintf(stderr, "ballast-worker validate: %s\n", err.text);
        return 1;
    }
    return rc;
}
