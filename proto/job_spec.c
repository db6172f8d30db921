/* job_spec.c - every key of the job file once, and what keys mean together
 *
 * A row is a key's whole definition: type, default, range, words, meaning. What the engine cannot
 * run yet is allowed by its row, because the file may say it, and refused by a line below. */
#include "proto/job_spec.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/job_degrees.h"

#define SEGMENT_MULTIPLE 64u /* tokens of a block inside of ops */
#define AT(member)   .offset = offsetof(Ballast__JobSpec, member)
#define LIST(member) AT(member), .count_offset = offsetof(Ballast__JobSpec, n_##member)
#define WORDS(...)   .words = (const char *const[]){__VA_ARGS__, NULL}

static const struct field_spelling checkpointing_spellings[] = {
    {"true", "full"}, {"false", "off"}, {NULL}};
static const struct field_spelling all_to_all_spellings[] = {
    {"true", "on"}, {"false", "off"}, {NULL}};
/* The planner may choose; one is all that this version runs. */
static const struct field_spelling degree_spellings[] = {{"auto", "1"}, {NULL}};
static const struct field_spelling sequence_parallel_spellings[] = {
    {"true", "auto"}, {"false", "1"}, {NULL}};

static const struct field fields[] = {
    {"name", FIELD_STRING, AT(name), .max = NAME_BYTES_MAX, .help = "how lists show the job"},

    {"model.path", FIELD_PATH, AT(model_path),
     .help = "a HuggingFace folder; without weights it is initialised from `model.init_seed`"},
    {"model.init_seed", FIELD_U64, AT(model_init_seed), .preset = "1", .max = 0x1p63,
     .help = "of the weights of a model without weights"},
    {"model.base_precision", FIELD_WORD, AT(model_base_precision), .preset = "bf16",
     WORDS("bf16", "mxfp4", "fp8", "f32"),
     .help = "of the frozen matrices in `train.mode: lora`"},

    {"data.train", FIELD_PATHS, LIST(data_train), .n_min = 1, .n_max = DATA_GLOBS_MAX,
     .help = "files or globs: .txt (bytes), .bin (u16, u32), .jsonl; of Megatron, prefixes without "
             ".idx and .bin"},
    {"data.validation", FIELD_PATHS, LIST(data_validation), .preset = "",
     .n_max = DATA_GLOBS_MAX, .help = "files or globs that training never reads"},
    {"data.format", FIELD_WORD, AT(data_format), .preset = "bytes",
     WORDS("bytes", "u16", "u32", "megatron", "jsonl"),
     .help = "what the files hold; jsonl: objects of input_ids and labels, where -100 is no label"},
    {"data.sequence_length", FIELD_U32, AT(data_sequence_length), .preset = "512", .min = 2,
     .max = 1e7, .unit = "tokens", .help = "of one training sequence"},
    {"data.pack", FIELD_PB_BOOL, AT(data_pack), .preset = "true",
     .help = "several documents in a row of a batch; they never see each other"},

    {"train.mode", FIELD_WORD, AT(train_mode), .preset = "full", WORDS("full", "lora", "indexer"),
     .help = "full: every weight; lora: adapters; indexer: warm-up of sparse attention"},
    {"train.steps", FIELD_U64, AT(train_steps), .min = 1, .max = 1e9,
     .help = "optimizer steps, counted over all attempts and resumed runs"},
    {"train.global_batch", FIELD_U32, AT(train_global_batch), .preset = "32", .min = 1,
     .max = 1e7, .unit = "sequences",
     .help = "per optimizer step, whatever the number of workers"},
    {"train.micro_batch", FIELD_U32, AT(train_micro_batch), .preset = "1", .min = 1,
     .max = 1 << 16, .unit = "sequences", .help = "per rank and pass; the rest is accumulated"},
    {"train.precision", FIELD_WORD, AT(train_precision), .preset = "f32", WORDS("f32", "bf16"),
     .help = "of activations and products; master weights are f32"},
    {"train.seed", FIELD_U64, AT(train_seed), .preset = "1", .max = 0x1p63,
     .help = "of the order of the data"},
    {"train.deterministic", FIELD_PB_BOOL, AT(train_deterministic), .preset = "false",
     .help = "the same bits in every run on the same layout, at some cost in speed"},
    {"train.on_nan", FIELD_WORD, AT(train_on_nan), .preset = "stop",
     WORDS("stop", "skip", "rollback"),
     .help = "when loss or gradient is not a number; skip gives up after 10 steps in a row, "
             "rollback after 3 times"},
    {"train.verify_every_steps", FIELD_U64, AT(train_verify_every_steps), .preset = "500",
     .max = 1e9, .unit = "steps",
     .help = "between comparisons of the weights that several ranks hold; also before each "
             "checkpoint; 0: never"},
    {"train.validation_every_steps", FIELD_U64, AT(train_validation_every_steps), .preset = "0",
     .max = 1e9, .unit = "steps", .help = "0: at checkpoints and at the end only"},
    {"train.validation_sequences", FIELD_U32, AT(train_validation_sequences), .preset = "32",
     .min = 1, .max = 1e6, .unit = "sequences", .help = "that one validation reads"},

    {"train.optimizer.name", FIELD_WORD, AT(optimizer_name), .preset = "adamw",
     WORDS("adamw", "muon", "muon_per_head"),
     .help = "of the update; Muon's is of matrices but embedding and head, whole or head by head, "
             "and AdamW's of the rest"},
    {"train.optimizer.lr", FIELD_DOUBLE, AT(optimizer_lr), .preset = "3e-3", .max = 10,
     .min_open = true, .help = "the highest learning rate of the schedule"},
    {"train.optimizer.betas", FIELD_DOUBLES, LIST(optimizer_betas), .preset = "[0.9, 0.95]",
     .max = 1, .min_open = true, .max_open = true, .n_min = 2, .n_max = 2,
     .help = "decay of the first and second moment"},
    {"train.optimizer.momentum", FIELD_DOUBLE, AT(optimizer_momentum), .preset = "0.95",
     .max = 1, .max_open = true, .help = "of Muon"},
    {"train.optimizer.eps", FIELD_DOUBLE, AT(optimizer_eps), .preset = "1e-8", .max = 1,
     .min_open = true, .help = "added to the root of the second moment"},
    {"train.optimizer.weight_decay", FIELD_DOUBLE, AT(optimizer_weight_decay), .preset = "0.1",
     .max = 1, .help = "times the learning rate, per step"},
    {"train.optimizer.decay", FIELD_WORD, AT(optimizer_decay), .preset = "matrices",
     WORDS("matrices", "all", "none"), .help = "which weights decay"},
    {"train.optimizer.clip_grad_norm", FIELD_DOUBLE, AT(optimizer_clip_grad_norm),
     .preset = "1.0", .max = 1e6, .help = "largest norm of the whole gradient; 0: no clipping"},

    {"train.schedule.name", FIELD_WORD, AT(schedule_name), .preset = "cosine",
     WORDS("constant", "linear", "cosine", "wsd"), .help = "the learning rate after the warm-up"},
    {"train.schedule.warmup_steps", FIELD_U64, AT(schedule_warmup_steps), .preset = "0",
     .max = 1e9, .unit = "steps", .help = "of a learning rate that rises from 0"},
    {"train.schedule.min_lr", FIELD_DOUBLE, AT(schedule_min_lr), .preset = "0", .max = 10,
     .help = "where the schedule ends"},

    {"train.lora.r", FIELD_U32, AT(lora_r), .preset = "8", .min = 1, .max = 4096,
     .help = "rank of the adapters"},
    {"train.lora.alpha", FIELD_DOUBLE, AT(lora_alpha), .preset = "16", .max = 1e6,
     .min_open = true, .help = "their scale is alpha / r"},
    {"train.lora.targets", FIELD_STRINGS, LIST(lora_targets), .preset = "[q_proj, o_proj]",
     .n_max = 64, .help = "ends of module paths that get adapters, or experts: the routed ones"},
    {"train.lora.shared_a", FIELD_PB_BOOL, AT(lora_shared_a), .preset = "false",
     .help = "one A for all experts of a layer"},
    {"train.lora.adapter", FIELD_PATH, AT(lora_adapter), .preset = "",
     .help = "a PEFT folder with an adapter to begin from; without: A random, B zero"},
    {"train.indexer.stage", FIELD_WORD, AT(indexer_stage), .preset = "sparse",
     WORDS("dense", "sparse"), .help = "what the indexer learns from"},
    {"train.indexer.with_model", FIELD_PB_BOOL, AT(indexer_with_model), .preset = "false",
     .help = "train.mode full or lora: the indexers learn beside the rest, in the sparse stage"},
    {"train.indexer.loss_coefficient", FIELD_DOUBLE, AT(indexer_loss_coefficient),
     .preset = "1.0", .max = 1e6, .help = "of the indexer's loss"},

    {"parallel.workers", FIELD_U32, AT(parallel_workers), .preset = "1", .min = 1,
     .max = RANKS_MAX, .help = "ranks of the job, one per worker"},
    {"parallel.fsdp_shard_degree", FIELD_U32, AT(parallel_fsdp_shard_degree), .preset = "1",
     .min = 1, .max = RANKS_MAX,
     .help = "ranks that the dense parameters are cut over; divides the workers"},
    {"parallel.expert_parallel_degree", FIELD_U32, AT(parallel_expert_parallel_degree),
     .preset = "1", .min = 1, .max = RANKS_MAX,
     .help = "ranks that the experts lie over; divides workers and experts"},
    {"parallel.expert_shard_degree", FIELD_U32, AT(parallel_expert_shard_degree),
     .preset = "auto", .min = 1, .max = RANKS_MAX, .zero = "auto",
     .help = "ranks that one expert is cut over; auto: workers / expert_parallel_degree"},
    {"parallel.sequence_parallel_degree", FIELD_U32, AT(parallel_sequence_parallel_degree),
     .preset = "1", .min = 1, .max = RANKS_MAX, .spellings = degree_spellings,
     .help = "ranks that one sequence is cut over; auto: the planner chooses"},
    {"parallel.sequence_parallel", FIELD_PB_BOOL,
     .same_as = "parallel.sequence_parallel_degree", .spellings = sequence_parallel_spellings,
     .help = "true is auto, false is 1"},
    {"parallel.tensor_parallel_degree", FIELD_U32, AT(parallel_tensor_parallel_degree),
     .preset = "1", .min = 1, .max = RANKS_MAX, .help = "ranks that one product is cut over"},
    {"parallel.activation_checkpointing", FIELD_WORD, AT(parallel_activation_checkpointing),
     .preset = "off", WORDS("off", "full", "selective"), .spellings = checkpointing_spellings,
     .help = "what a backward pass makes again of its layer: nothing, all, or what is cheap to "
             "make; all but off: of experts a rank has a piece of its rows at a time, however "
             "tokens are routed; true is full"},
    {"parallel.segment_tokens", FIELD_U32, AT(parallel_segment_tokens), .preset = "off",
     .min = SEGMENT_MULTIPLE, .max = 1e9, .zero = "off", .unit = "tokens",
     .help = "layers take a long pass so many tokens at a time, so that what they hold does not "
             "grow with it; a multiple of 64, with activation_checkpointing: full"},
    {"parallel.offload", FIELD_WORD, AT(parallel_offload), .preset = "off",
     WORDS("off", "activations", "optimizer"), .help = "what waits in host memory"},
    {"parallel.overlap", FIELD_PB_BOOL, AT(parallel_overlap), .preset = "true",
     .help = "weights come, gradients go and tokens travel while a rank computes; false: one "
             "after another, in less memory, with the same numbers"},
    {"parallel.hierarchical_all_to_all", FIELD_WORD, AT(parallel_hierarchical_all_to_all),
     .preset = "auto", WORDS("auto", "on", "off"), .spellings = all_to_all_spellings,
     .help = "a token crosses to another node once, to one rank, which passes it on there"},
    {"parallel.register_buffers", FIELD_PB_BOOL, AT(parallel_register_buffers), .preset = "false",
     .help = "NCCL (2.19 or later) is told of the memory that tensors travel from and to, which "
             "may spare it a copy; off, as nobody has measured it yet"},

    {"moe.capacity_factor", FIELD_DOUBLE, AT(moe_capacity_factor), .preset = "0", .max = 1e3,
     .help = "room of an expert for a micro-batch's choices, over the mean; 0: dropless"},
    {"moe.force_balance", FIELD_PB_BOOL, AT(moe_force_balance), .preset = "false",
     .help = "choices go to all experts in turn, whatever the router wants: to measure what an "
             "even load would cost, not to train"},
    {"moe.overflow", FIELD_WORD, AT(moe_overflow), .preset = "drop", WORDS("drop", "reroute"),
     .help = "tokens beyond an expert's capacity; reroute: to their next best expert with room"},
    {"moe.drop_by", FIELD_WORD, AT(moe_drop_by), .preset = "probability",
     WORDS("probability", "position"), .help = "which tokens go first"},
    {"moe.aux_loss", FIELD_DOUBLE, AT(moe_aux_loss), .preset = "0", .max = 1e3,
     .help = "coefficient of the balance loss"},
    {"moe.aux_scope", FIELD_WORD, AT(moe_aux_scope), .preset = "global",
     WORDS("micro_batch", "sequence", "global"),
     .help = "what the balance loss is taken over; sequence: each document; global: the whole "
             "batch, at the cost of one more forward"},
    {"moe.z_loss", FIELD_DOUBLE, AT(moe_z_loss), .preset = "0", .max = 1e3,
     .help = "coefficient of the loss on the router's logits"},
    {"moe.bias_update", FIELD_WORD, AT(moe_bias_update), .preset = "quantile",
     WORDS("off", "sign", "quantile"), .help = "how the router's correction bias follows the load"},
    {"moe.bias_update_rate", FIELD_DOUBLE, AT(moe_bias_update_rate), .preset = "1e-3", .max = 1,
     .help = "step of the correction bias"},

    {"rebalance.auto", FIELD_PB_BOOL, AT(rebalance_auto), .preset = "true",
     .help = "move experts when it pays"},
    {"rebalance.spare_slots_per_rank", FIELD_U32, AT(rebalance_spare_slots_per_rank),
     .preset = "1", .max = EXPERTS_MAX, .help = "for copies of hot experts"},
    {"rebalance.window_steps", FIELD_U32, AT(rebalance_window_steps), .preset = "20", .min = 1,
     .max = 1e6, .unit = "steps", .help = "that one decision looks back on"},
    {"rebalance.horizon_steps", FIELD_U32, AT(rebalance_horizon_steps), .preset = "200",
     .min = 1, .max = 1e7, .unit = "steps", .help = "over which a move must win its cost"},
    {"rebalance.min_gain", FIELD_DOUBLE, AT(rebalance_min_gain), .preset = "0.02", .max = 1,
     .help = "share of the time of a layer's experts below which they stay"},
    {"rebalance.boundary_mib", FIELD_U32, AT(rebalance_boundary_mib), .preset = "256",
     .max = 1u << 20, .unit = "MiB", .help = "that a rank sends, and receives, at one step "
             "boundary where experts move; a larger plan is spread over several (0: no limit)"},
    {"rebalance.layer_moves", FIELD_U32, AT(rebalance_layer_moves), .preset = "4",
     .max = EXPERTS_MAX, .help = "experts of one layer that a rank sends, and receives, at one "
             "step boundary (0: no limit)"},

    {"checkpoint.path", FIELD_PATH, AT(checkpoint_path),
     .help = "a folder; the newest checkpoint in it is where the job goes on"},
    {"checkpoint.every_steps", FIELD_U64, AT(checkpoint_every_steps), .preset = "100", .min = 1,
     .max = 1e9, .unit = "steps", .help = "between checkpoints; one more at the end"},
    {"checkpoint.keep", FIELD_U32, AT(checkpoint_keep), .preset = "3", .min = 1, .max = 1e6,
     .help = "newest ones that stay"},
    {"checkpoint.dtype", FIELD_WORD, AT(checkpoint_dtype), .preset = "source",
     WORDS("source", "f32", "bf16", "f16"),
     .help = "of the weights; source: each tensor's in model.path, f32 without weights there. What "
             "it rounds is kept in f32 beside it, for resuming"},

    {"trace.steps", FIELD_U64, AT(trace_steps), .preset = "0", .max = 1000, .unit = "steps",
     .help = "whose layers and collectives are written to trace/rank-N.json in the checkpoints' "
             "folder, for Perfetto"},
    {"trace.first_step", FIELD_U64, AT(trace_first_step), .preset = "3", .min = 1, .max = 1e9,
     .help = "the first of them"},

    {"scheduling.priority", FIELD_I32, AT(scheduling_priority), .preset = "0",
     .min = -PRIORITY_MAX, .max = PRIORITY_MAX, .help = "higher starts first"},
    {"scheduling.max_restarts", FIELD_U32, AT(scheduling_max_restarts), .preset = "3",
     .max = 1e6, .help = "attempts that fail one after another"
             " without a new checkpoint"},
    {"scheduling.time_limit", FIELD_DURATION, AT(scheduling_time_limit_s), .preset = "none",
     .min = 1, .max = 86400.0 * 3650, .zero = "none", .duration_ns = NS_PER_S,
     .help = "of running time"},
    {"scheduling.after", FIELD_U64S, LIST(scheduling_after), .preset = "[]", .min = 1,
     .max = 0x1p53, .help = "ids of jobs that must be DONE first"},
};

const struct field_table job_spec_table = {fields, sizeof fields / sizeof *fields};

/* ---- what this version cannot run yet ------------------------------------------------------- */

struct unsupported {
    const char *key, *value; /* value NULL: any number above max */
    double max;
    const char *instead;
};

static const struct unsupported unsupported[] = {
    {"parallel.sequence_parallel_degree", NULL, 1, "1"},
    {"parallel.tensor_parallel_degree", NULL, 1, "1"},
    {"parallel.offload", "activations", 0, "off"},
    {"parallel.offload", "optimizer", 0, "off"},
};

static void check_supported(const Ballast__JobSpec *spec, struct problems *out)
{
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        const struct unsupported *u = &unsupported[i];
        char *value = field_text(field_find(&job_spec_table, u->key), spec);
        if (u->value ? !strcmp(value, u->value) : strtod(value, NULL) > u->max)
            problems_add(out, NULL, u->key, "%s is not supported yet; this version runs %s", value,
                         u->instead);
        free(value);
    }
}

void job_spec_print_unsupported(FILE *out)
{
    const char *last = "";
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        if (strcmp(unsupported[i].key, last) != 0)
            fprintf(out, "| `%s` | %s |\n", unsupported[i].key, unsupported[i].instead);
        last = unsupported[i].key;
    }
}

/* ---- what keys mean together ---------------------------------------------------------------- */

static void check_schedule(const Ballast__JobSpec *s, struct problems *out)
{
    if (s->schedule_warmup_steps >= s->train_steps)
        problems_add(out, NULL, "train.schedule.warmup_steps",
                     "%" PRIu64 " is not less than train.steps (%" PRIu64 ")",
                     s->schedule_warmup_steps, s->train_steps);
    if (s->schedule_min_lr > s->optimizer_lr)
        problems_add(out, NULL, "train.schedule.min_lr",
                     "%g is above train.optimizer.lr (%g)", s->schedule_min_lr, s->optimizer_lr);
}

static void check_lora(const Ballast__JobSpec *s, struct problems *out)
{
    if (strcmp(s->train_mode, "lora") != 0)
        return;
    if (s->n_lora_targets == 0)
        problems_add(out, NULL, "train.lora.targets", "is empty; expected ends of module paths, as "
                     "in [q_proj, o_proj, experts]");
    if (s->lora_shared_a && s->train_deterministic)
        problems_add(out, NULL, "train.lora.shared_a", "the sum over the experts of a rank changes "
                     "bits when they move, which train.deterministic excludes; expected false");
}

static void check_indexer(const Ballast__JobSpec *s, struct problems *out)
{
    if (!s->indexer_with_model)
        return;
    if (strcmp(s->train_mode, "indexer") == 0)
        problems_add(out, NULL, "train.indexer.with_model", "true goes with train.mode full or "
                     "lora, not %s", s->train_mode);
    if (strcmp(s->indexer_stage, "sparse") != 0)
        problems_add(out, NULL, "train.indexer.with_model", "true goes with train.indexer.stage "
                     "sparse, not %s", s->indexer_stage);
}

static void check_segments(const Ballast__JobSpec *s, struct problems *out)
{
    static const char key[] = "parallel.segment_tokens";
    uint32_t n = s->parallel_segment_tokens;
    if (n == 0)
        return;
    if (n % SEGMENT_MULTIPLE != 0)
        problems_add(out, NULL, key, "%" PRIu32 " is not a multiple of %u; the nearest is %" PRIu32,
                     n, SEGMENT_MULTIPLE,
                     (n + SEGMENT_MULTIPLE / 2) / SEGMENT_MULTIPLE * SEGMENT_MULTIPLE);
    if (strcmp(s->parallel_activation_checkpointing, "full") != 0)
        problems_add(out, NULL, key, "goes with parallel.activation_checkpointing: full, not %s",
                     s->parallel_activation_checkpointing);
    if (s->moe_aux_loss > 0 && strcmp(s->moe_aux_scope, "sequence") == 0)
        problems_add(out, NULL, key, "cuts documents, of which moe.aux_scope: sequence is; "
                     "expected global or micro_batch there");
    if (strcmp(s->train_mode, "indexer") == 0 && strcmp(s->indexer_stage, "dense") == 0)
        problems_add(out, NULL, key, "needs attention over chosen keys; train.indexer.stage: dense "
                     "is over all");
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && !strcmp(text + n - n_end, end);
}

static void check_endings(const char *key, char *const *files, size_t n, const char *format,
                          struct problems *out)
{
    static const struct { const char *ending, *formats; } rows[] = {
        {".txt", "bytes"}, {".bin", "u16 or u32"}, {".jsonl", "jsonl"}, {".idx", ""}};
    for (size_t i = 0; i < n; i++)
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            char quoted[FIELD_QUOTE_BYTES];
            if (!ends_with(files[i], rows[r].ending) || strstr(rows[r].formats, format))
                continue;
            field_quote(files[i], quoted);
            if (strcmp(rows[r].ending, ".idx") == 0 ||
                (strcmp(rows[r].ending, ".bin") == 0 && strcmp(format, "megatron") == 0))
                problems_add(out, NULL, key, "%s is half of a Megatron dataset, which is named by "
                             "its prefix without .idx and .bin, with data.format megatron", quoted);
            else
                problems_add(out, NULL, key, "%s is read with data.format %s, not %s", quoted,
                             rows[r].formats, format);
            return;
        }
}

static void check_absolute(const char *key, const char *path, struct problems *out)
{
    char quoted[FIELD_QUOTE_BYTES];
    if (!path || *path == '/')
        return;
    field_quote(path, quoted);
    problems_add(out, NULL, key, "%s is not an absolute path", quoted);
}

static void check_paths(const Ballast__JobSpec *s, struct problems *out)
{
    check_absolute("model.path", s->model_path, out);
    check_absolute("checkpoint.path", s->checkpoint_path, out);
    if (s->lora_adapter && *s->lora_adapter)
        check_absolute("train.lora.adapter", s->lora_adapter, out);
    for (size_t i = 0; i < s->n_data_train; i++)
        check_absolute("data.train", s->data_train[i], out);
    for (size_t i = 0; i < s->n_data_validation; i++)
        check_absolute("data.validation", s->data_validation[i], out);
    check_endings("data.train", s->data_train, s->n_data_train, s->data_format, out);
    check_endings("data.validation", s->data_validation, s->n_data_validation, s->data_format,
                  out);
}

int job_spec_check_together(const Ballast__JobSpec *spec, uint32_t n_experts,
                            struct problems *out)
{
    size_t before = out->n_total;
    check_supported(spec, out);
    job_degrees_check(spec, n_experts, out);
    check_schedule(spec, out);
    check_indexer(spec, out);
    check_lora(spec, out);
    check_segments(spec, out);
    check_paths(spec, out);
    return out->n_total > before ? -EINVAL : 0;
}

int job_spec_check(const Ballast__JobSpec *spec, struct problems *out)
{
    size_t before = out->n_total;
    fields_check(&job_spec_table, spec, out);
    if (out->n_total > before)
        return -EINVAL; /* what they mean together needs each of them in its range */
    return job_spec_check_together(spec, JOB_EXPERTS_UNKNOWN, out);
}

struct layout_degrees job_spec_degrees(const Ballast__JobSpec *spec)
{
    return (struct layout_degrees){
        .world = spec->parallel_workers,
        .fsdp = spec->parallel_fsdp_shard_degree,
        .ep = spec->parallel_expert_parallel_degree,
        .expert_shard = spec->parallel_expert_shard_degree,
    };
}
