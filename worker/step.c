/* step.c - one optimizer step of all ranks
 *
 * Gradients are sums over tokens; one sum over ranks at the end tells everybody the number of
 * tokens, the loss and the load of every device. The boundary word is a second one, and all grant
 * what it says at this very step. */
#include "worker/step.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/mem.h"
#include "kernels/spans.h"
#include "worker/bad.h"
#include "worker/boundary.h"
#include "worker/step_batch.h"

static double seconds_since(uint64_t began_ns)
{
    return (double)(clock_now_ns() - began_ns) / NS_PER_S;
}

/* ---- passes -------------------------------------------------------------------------------- */

/* The choices of the whole global batch, before any of it is trained on. */
static int survey(struct run *run, struct err *err)
{
    size_t n = (size_t)run->model_spec.n_layers * run->model_spec.n_experts;
    uint64_t n_micro = step_n_batches(run);
    int64_t *choices = xcalloc(n, sizeof *choices);
    double *sums = xcalloc(n, sizeof *sums);
    int rc = 0;
    model_set_choices(run->model, NULL);
    for (uint64_t k = 0; k < n_micro && rc == 0; k++)
        if ((rc = step_batch(run, k, err)) == 0) {
            struct model_batch b = step_batch_of(&run->batch);
            rc = model_survey(run->model, &b, err);
        }
    if (rc == 0) {
        model_choices(run->model, choices);
        for (size_t i = 0; i < n; i++)
            sums[i] = (double)choices[i];
        run->coll->layer = -1;
        rc = run->coll->ops->all_reduce_f64(run->coll, &run->coll->world_group, COLL_SUM, sums, n,
                                            err);
        for (size_t i = 0; i < n; i++)
            choices[i] = (int64_t)sums[i];
        model_set_choices(run->model, choices);
    }
    free(choices);
    free(sums);
    return rc;
}

/* This rank's loss, labels and inputs over all its micro-batches, gradients left in shard. */
static int accumulate(struct run *run, struct model_loss *out, int64_t *out_tokens,
                      struct err *err)
{
    uint64_t n_micro = step_n_batches(run);
    *out = (struct model_loss){0};
    *out_tokens = 0;
    bool surveys = run->rules.aux_loss > 0 && run->rules.aux_scope == AUX_GLOBAL &&
                   run->model_spec.n_experts > 0 &&
                   (run->index_stage == INDEX_FROZEN || run->index_joint);
    int surveyed = surveys ? survey(run, err) : 0;
    if (surveyed < 0)
        return surveyed;
    for (uint64_t k = 0; k < n_micro; k++) {
        struct model_loss loss = {0};
        int rc = step_batch(run, k, err);
        if (rc < 0)
            return rc;
        if (atomic_load(&run->wishes->cancelled))
            return err_set(err, -ECANCELED, "rank %u was stopped", run->coll->rank);
        struct model_batch b = step_batch_of(&run->batch);
        failpoint("in-batch");
        if ((rc = model_step(run->model, &b, true, &loss, err)) < 0)
            return rc;
        if (failpoint("bad-loss") < 0)
            loss.sum = NAN;
        out->sum += loss.sum;
        out->n_labels += loss.n_labels;
        out->aux += loss.aux;
        out->z += loss.z;
        out->index += loss.index;
        *out_tokens += b.n_tokens;
    }
    return 0;
}

/* ---- what all ranks learn ------------------------------------------------------------------- */

/* run->sums: these, then rows served per (layer, device of the expert groups). */
enum { SUM_LOSS, SUM_LABELS, SUM_INPUTS, SUM_AUX, SUM_Z, SUM_INDEX, SUM_REROUTED, SUM_DROPPED,
       SUM_ROWS };
_Static_assert(SUM_ROWS == RUN_SUMS, "as many as run.h makes room for");

static int sum_over_ranks(struct run *run, const struct model_loss *mine, int64_t n_tokens,
                          struct err *err)
{
    uint32_t ep = run->layout.ep.n_ranks, n_layers = run->model_spec.n_layers;
    size_t n = SUM_ROWS + (run->model_spec.n_experts > 0 ? (size_t)n_layers * ep : 0);
    memset(run->sums, 0, n * sizeof *run->sums);
    run->sums[SUM_LOSS] = mine->sum;
    run->sums[SUM_LABELS] = (double)mine->n_labels;
    run->sums[SUM_INPUTS] = (double)n_tokens;
    run->sums[SUM_AUX] = mine->aux;
    run->sums[SUM_Z] = mine->z;
    run->sums[SUM_INDEX] = mine->index;
    const struct model_counters *c = n > SUM_ROWS ? model_counters(run->model) : NULL;
    for (uint32_t l = 0; c && l < n_layers; l++) {
        run->sums[SUM_REROUTED] += (double)c->rerouted[l];
        run->sums[SUM_DROPPED] += (double)c->dropped[l];
        run->sums[SUM_ROWS + (size_t)l * ep + run->layout.ep.me] = (double)c->layer_rows[l];
    }
    run->coll->layer = -1;
    spans_begin(run->dev, PHASE_AGREE, -1);
    int rc = run->coll->ops->all_reduce_f64(run->coll, &run->coll->world_group, COLL_SUM,
                                            run->sums, n, err);
    spans_end(run->dev);
    return rc;
}

static uint32_t n_sparse(const struct run *run)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < run->model_spec.n_layers; l++)
        n += slots_is_sparse(&run->slots, l);
    return n;
}

/* Also sees that no row was lost: every token is served top_k times in every sparse layer, but for
 * what a capacity dropped. */
static double imbalance_of(const struct run *run)
{
    uint32_t ep = run->layout.ep.n_ranks, n_layers = 0;
    double sum = 0, served = run->sums[SUM_DROPPED];
    for (uint32_t l = 0; l < run->model_spec.n_layers; l++) {
        const double *rows = run->sums + SUM_ROWS + (size_t)l * ep;
        double largest = 0, all = 0;
        if (!slots_is_sparse(&run->slots, l))
            continue;
        for (uint32_t place = 0; place < ep; place++) {
            largest = rows[place] > largest ? rows[place] : largest;
            all += rows[place];
        }
        served += all;
        if (all > 0) {
            sum += largest / (all / ep);
            n_layers++;
        }
    }
#ifdef BALLAST_CHECKS
    assert(served == run->sums[SUM_INPUTS] * run->model_spec.top_k * n_sparse(run));
#else
    (void)served;
#endif
    return n_layers > 0 ? sum / n_layers : 1;
}

/* The mean over layers; NaN where the job asks for none. */
static double router_loss(const struct run *run, int sum, float coefficient)
{
    double n = run->sums[SUM_LABELS] * n_sparse(run);
    return coefficient > 0 && n > 0 ? run->sums[sum] / n : NAN;
}

static int make_transfer(void *shard, struct slots *slots, struct slots *to,
                         uint32_t *const *stage, struct transfer **out, struct err *err)
{
    return transfer_create(shard, slots, to, stage, out, err);
}

/* What this rank says at the boundary; a plan that has come is looked at now. */
static struct boundary_word my_word(struct run *run, const struct bad *bad)
{
    usage_look(&run->usage, run->dev, run->coll);
    plans_take(run->plans, run->start->job_id, run->start->attempt, make_transfer, run->shard,
               &run->slots);
    return (struct boundary_word){
        .wish = (enum run_wish)atomic_load(&run->wishes->wish), .epoch = plans_ready(run->plans),
        .ahead = plans_ahead(run->plans), .settings = settings_look(run->settings),
        .memory_bytes = run->usage.peak, .bad = *bad, .busy_s = run->busy_s,
    };
}

/* What a rank did itself in a step; the rest it stood still for others. */
static double busy_of(const struct step_result *r)
{
    double s = r->seconds[PHASE_OPTIMIZER];
    for (int i = PHASE_DATA; i <= PHASE_OTHER; i++)
        s += r->seconds[i];
    return s;
}

/* ---- the step ------------------------------------------------------------------------------- */

static int update(struct run *run, double n_labels, struct step_result *r, struct err *err)
{
    uint64_t step = run->state.step + 1;
    int rc = optim_norm(run->shard, &run->map, run->coll, run->dev, n_labels, &r->grad_norm, err);
    if (rc < 0)
        return rc;
    r->lr = schedule_lr(&run->schedule, step);
    r->is_bad = !isfinite(r->loss) || !isfinite(r->grad_norm);
    if (!r->is_bad) {
        optim_step(run->shard, &run->map, run->dev, &run->optim, step, r->lr, n_labels,
                   r->grad_norm);
        rc = optim_muon(run->shard, &run->map, &run->model_spec, &run->optim, r->lr, n_labels,
                        r->grad_norm, err);
        if (rc == 0 && run->model_spec.n_experts > 0)
            rc = optim_balance(run->shard, &run->map, &run->model_spec, run->coll, run->dev,
                               model_counters(run->model), run->bias_rule,
                               run->spec->moe_bias_update_rate, err);
        if (rc == 0)
            rc = run->optim.kind == OPTIM_ADAMW ? shard_refresh_copies(run->shard, err)
                                                : shard_refresh(run->shard, err);
    }
    return rc;
}

/* Of this step over all ranks, as a model's are counted: what is computed again is not. */
static double model_flops(const struct run *run)
{
    struct model_counts n = model_spec_count(&run->model_spec);
    return run->sums[SUM_INPUTS] * model_spec_flops(&n);
}

int step_train(struct run *run, struct step_result *out, struct err *err)
{
    struct step_result r = {0};
    struct model_loss mine;
    uint64_t began = clock_now_ns();
    struct boundary_word word;
    int64_t n_tokens;
    int rc;
    model_counters_reset(run->model);
    bool is_traced = trace_begins(run->trace, run->state.step + 1);
    spans_reset(run->dev, is_traced ? trace_span : NULL, run->trace);
    spans_begin(run->dev, PHASE_OTHER, -1); /* all that no other span is around */
    if ((rc = accumulate(run, &mine, &n_tokens, err)) < 0 ||
        (rc = sum_over_ranks(run, &mine, n_tokens, err)) < 0)
        return rc;
    double n_labels = run->sums[SUM_LABELS] > 0 ? run->sums[SUM_LABELS] : 1;
    r.loss = run->sums[SUM_LOSS] / n_labels;
    r.imbalance = imbalance_of(run);
    r.aux_loss = router_loss(run, SUM_AUX, run->rules.aux_loss);
    r.z_loss = router_loss(run, SUM_Z, run->rules.z_loss);
    r.index_loss = run->index_joint ? run->sums[SUM_INDEX] / n_labels : NAN;
    r.n_rerouted = (uint64_t)run->sums[SUM_REROUTED];
    r.n_dropped = (uint64_t)run->sums[SUM_DROPPED];
    spans_begin(run->dev, PHASE_OPTIMIZER, -1);
    rc = update(run, n_labels, &r, err);
    spans_end(run->dev);
    if (rc < 0)
        return rc;
    r.bad = BAD_NOTHING;
    if (r.is_bad && (rc = bad_find(run, step_n_batches(run), &r.bad, err)) < 0)
        return rc;
    struct boundary_word mine_word = my_word(run, &r.bad);
    spans_begin(run->dev, PHASE_AGREE, -1);
    rc = boundary_agree(run, &mine_word, &word, err);
    spans_end(run->dev);
    if (rc < 0)
        return rc;
    r.wish = word.wish;
    r.epoch = word.epoch;
    r.ahead = word.ahead;
    r.settings = word.settings;
    r.memory_bytes = word.memory_bytes;
    r.busy_s = word.busy_s;
    r.least_busy_s = word.least_busy_s;
    r.busiest = word.busiest;
    r.bad = word.bad;
    shard_zero_gradients(run->shard);
    run->dev->ops->step_over(run->dev);
    run->state.step++;
    run->state.next_sample += run->spec->train_global_batch;
    spans_end(run->dev);
    r.step_s = seconds_since(began);
    r.tokens_per_second = run->sums[SUM_INPUTS] / r.step_s;
    r.mfu = run->rate > 0 ? model_flops(run) / (r.step_s * run->rate) : NAN;
    for (int i = 0; i < PHASES; i++)
        r.seconds[i] = spans_seconds(run->dev, (uint32_t)i);
    run->busy_s = busy_of(&r);
    *out = r;
    return 0;
}

/* ---- validation ----------------------------------------------------------------------------- */

int step_validate(struct run *run, struct err *err)
{
    uint64_t wanted = run->spec->train_validation_sequences, n = run->spec->train_micro_batch;
    double sums[2] = {0};
    int rc = 0;
    if (!run->validation)
        return 0;
    if (wanted > data_windows(run->validation))
        wanted = data_windows(run->validation);
    for (uint64_t first = 0; first < wanted; first += n * run->coll->world) {
        struct model_loss loss = {0};
        uint64_t mine = first + run->coll->rank * n;
        data_batch_clear(&run->batch); /* a rank without samples takes part with no tokens */
        for (uint64_t i = mine; i < mine + n && i < wanted && rc == 0; i++)
            rc = data_window(run->validation, i, &run->batch, err);
        struct model_batch b = step_batch_of(&run->batch);
        if (rc < 0 || (rc = model_step(run->model, &b, false, &loss, err)) < 0)
            return rc;
        sums[0] += loss.sum;
        sums[1] += (double)loss.n_labels;
    }
    run->coll->layer = -1;
    rc = run->coll->ops->all_reduce_f64(run->coll, &run->coll->world_group, COLL_SUM, sums, 2, err);
    if (rc == 0)
        run->state.validation_loss = sums[1] > 0 ? sums[0] / sums[1] : NAN;
    return rc;
}
