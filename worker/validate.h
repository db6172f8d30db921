/* validate.h - runs a model on a fixture's tokens and compares with what the fixture expects
 *
 * A fixture is a folder: expected.safetensors (tokens, logits), gradients/model.safetensors (some
 * gradients under the checkpoint's names), expected.json (losses, optimizer settings, curve), and
 * where adapters are trained, too, lora-start/ and lora-end/. */
#ifndef WORKER_VALIDATE_H
#define WORKER_VALIDATE_H

#include <stdio.h>

#include "common/layout.h"
#include "common/safetensors.h"
#include "common/tensor_map.h"
#include "worker/optim.h"
#include "worker/peft.h"
#include "worker/stack.h"

/* The command: argv[0] is the word `validate`. 0: within tolerance; 1: not, or it failed; 2: usage
 * error. */
int validate_main(int argc, char **argv);

/* ---- the fixture (validate_fixture.c) ---- */

/* Rows of tokens, each cut into documents at the same places. */
struct token_rows {
    int32_t *tokens;     /* (n_rows, length) */
    uint32_t n_rows, length;
    int32_t *cu_seqlens; /* n_docs + 1, of each row */
    int32_t  n_docs;
};

/* Settings of an optimizer and the losses before each of its steps. */
struct curve {
    const char *name; /* "gentle", "adamw" or "lora" */
    struct optim_config optim;
    double  lr;
    double *losses, *norms; /* n_steps of the fixture; norms may be NULL */
    double *exact; /* the losses in float64, of a curve where float32 runs part; else NULL */
    double  after; /* loss of the first batch after the curve; NAN: not given */
};
#define CURVES_MAX 2
#define TWINS 3
#define LORA_TWINS 8
/* How far twins are moved. Two float32 programs' logits are apart by 1e-6; an adapter's twins are
 * moved as far, because nothing but they can say where its curve begins to hang on luck. */
#define TWIN_MOVE      1e-7f
#define LORA_TWIN_MOVE 1e-6f
#define ROUNDED_RUNS 6

struct fixture {
    struct safetensors *expected, *gradients; /* gradients may be NULL */
    struct token_rows batch;  /* logits, loss and gradients */
    struct token_rows packed; /* n_rows 0: none */
    struct token_rows *steps; /* n_steps batches, of every curve */
    uint32_t n_steps, n_curves;
    struct curve curves[CURVES_MAX]; /* one where float32 runs stay together first */
    struct curve lora;            /* of adapters; losses NULL: none */
    char *lora_start;             /* where they begin; NULL: not given */
    struct safetensors *lora_end; /* what they become; may be NULL */
    double loss, packed_loss, packed_norm; /* NAN: not given */
};

/* Reads and checks everything against the model. Gives *out, ended with fixture_close. */
int  fixture_open(const char *folder, const struct model_spec *spec, struct fixture *out,
                  struct err *err);
void fixture_close(struct fixture *f);

/* ---- the run (validate_run.c) ---- */

struct validation_moves { /* random placements while the curve runs */
    uint32_t every; /* steps; 0: none */
    uint64_t seed;
};

struct validation { /* what the ranks computed */
    const char *model_path;
    const struct fixture *fixture;
    enum elem_type elem; /* of the device */
    uint32_t n_steps;
    struct validation_moves moves;
    uint32_t rounding;   /* of the weights that it began from: 1 to nearest, more: by chance */
    struct validation *rounded; /* n_rounded runs to compare a bfloat16 one with; else NULL */
    uint32_t n_rounded;
    uint32_t n_migrations;
    uint64_t moved_bytes;           /* over all ranks */
    double   pause_s, step_s;       /* of the slowest rank, sums over migrations and steps */
    double   best_step_s; /* of rank 0; on a CPU, of its thread alone */
    uint64_t digest;                /* of weights and state after the first curve, on any layout */
    float  *logits, *packed_logits; /* (rows, length, vocab) */
    double  loss, norm, packed_loss, packed_norm;
    float **gradients;              /* by entry of the map: stored_count, of the mean loss */
    struct lora_validation *lora;   /* NULL: not asked for */
    struct {
        double *losses, *norms;     /* n_steps */
        double  after;              /* NAN: the curve was not run to its end */
    } curves[CURVES_MAX];
    double *twins[TWINS]; /* losses of a parting curve from weights moved by 1e-7, n_steps each */
};

#define VALIDATION_SEED 1u /* of weights that no folder has */

/* Gives *out, ended with validation_fini; fixture and model_path are kept until then. model_path
 * NULL: weights are drawn from VALIDATION_SEED. rounding 0:
 * from the weights as they are, and with twins. */
int  validation_run(const struct stack_config *config, const char *model_path,
                    const struct fixture *fixture, uint32_t n_steps,
                    struct validation_moves moves, uint32_t rounding, struct validation *out,
                    struct err *err);
void validation_fini(struct validation *v, const struct tensor_map *map);

/* Tokens that a rank holds at most in one call. */
int64_t validation_tokens_max(const struct fixture *f);

/* Of one rank: the mean loss of rows over all ranks, and with backward the gradients' norm; the
 * gradient sums stay. Documents go to the ranks in turn, from rank turn on. Collective. */
int validation_loss(struct stack *s, const struct token_rows *rows, uint32_t turn, bool backward,
                    double *out_loss, double *out_norm, double *out_labels, struct err *err);
/* Moves each of all weights, or where there are adapters of these, up or down by that part of it;
 * 1e-7 is its last bit or two. */
void validation_move_start(struct stack *s, uint32_t twin, float by);
/* All ranks go to the same random placement. Collective. */
int validation_migrate(struct stack *s, struct validation *v, uint32_t step, struct err *err);

/* ---- rounded weights (validate_rounded.c) ---- */

void validation_round_start(struct stack *s, uint32_t rounding);
/* Runs v's quantities ROUNDED_RUNS times in float32 from rounded weights, into v->rounded. adapter:
 * as validation_lora was given; NULL: none. */
int  validation_add_rounded(const struct stack_config *config, const char *adapter,
                            struct validation *v, struct err *err);

/* ---- adapters (validate_lora.c) ---- */

struct lora_validation {
    struct peft peft;
    struct tensor_map map; /* the model's with adapters */
    double *losses;        /* n_steps of the validation */
    double *twins[LORA_TWINS]; /* the same from adapters moved by 1e-6 */
    float **adapters;      /* by entry of the map, after the last step; NULL: no adapter */
};

/* Trains the adapter of a folder along the fixture's curve, in place of the model's weights. Adds
 * to v, which holds what it is part of. */
int validation_lora(const struct stack_config *config, const char *adapter, struct validation *v,
                    struct err *err);
void lora_validation_destroy(struct lora_validation *l);

/* ---- the verdict (validate_compare.c) ---- */

/* A quantity's element that is furthest above, or least below, its tolerance. */
struct worst {
    double value, tolerance;
    double rounded; /* what rounded weights alone give there; 0: nobody ran them */
    char   where[160]; /* empty: the fixture does not say */
};

enum verdict_row {
    ROW_LOGITS, ROW_LOSS, ROW_GRADIENTS, ROW_PACKED_LOGITS, ROW_PACKED_LOSS, ROW_PACKED_NORM,
    ROW_CURVE, ROW_CURVE_NORMS, ROW_AFTER, ROW_PARTING_CURVE, ROW_LORA_CURVE, ROW_LORA_ADAPTER,
    VERDICT_ROWS
};

struct verdict {
    struct worst rows[VERDICT_ROWS];
    /* The first step at which float32 is no measure of a parting curve: the fixture's runs have
     * parted, or runs of our own from weights moved by 1e-7. 0: none. */
    uint32_t fixture_parts_at, twins_part_at;
    uint32_t lora_twins_part_at; /* of adapters' curves; 0: nowhere */
    const char *first; /* first gradient above tolerance in the order of the backward, or NULL */
    bool is_met;
};

/* -EINVAL when the fixture's gradients are not the model's. *out's names are the map's. */
int  verdict_of(const struct validation *v, const struct tensor_map *map, struct verdict *out,
                struct err *err);
void verdict_print(const struct verdict *v);

/* ---- without a fixture (validate_self.c) ---- */

/* Checks of one rank against others, of gradients against finite differences and of the loss curve,
 * of weights that are drawn from a seed; config's degrees and tokens_max are not looked at. A line
 * for each, as JSON if asked, and one with what a step takes. */
int  validation_self(const struct stack_config *config, uint32_t n_steps, bool json, FILE *out,
                     bool *out_passed, struct err *err);

/* What a step of such a model takes on one rank with one thread. */
int  validation_speed(const struct stack_config *config, bool json, FILE *out, struct err *err);

/* ---- the dump (validate_dump.c) ---- */

/* logits.safetensors, gradients.safetensors and report.json in folder, which is made if need be. */
int validation_dump(const char *folder, const struct validation *v, const struct model_spec *spec,
                    const struct tensor_map *map, const struct verdict *verdict, struct err *err);

#endif
