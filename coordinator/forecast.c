/* forecast.c - predictors, their rolling back-test, and the error that goes into every decision
 *
 * Each window first tests what every predictor said about it, then teaches them. A predictor is a
 * way to combine the past, and a shrinkage towards the mean expert: where loads jump about, less
 * belief in differences is the better forecast. Scores weigh hot and cold experts alike (squared
 * error over load) and forget slowly.
 *
 * The error of a load m is believed to be noise * m + spread^2 * m^2: counting noise, which
 * bursts of tokens make larger than Poisson's, and drift in proportion. Both are fitted to the
 * errors of the believed predictions, starting from what short windows of real routers show. */
#include "coordinator/forecast.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define WINDOWS      8    /* that mean, trend and quantile look at */
#define SCORE_DECAY  0.9
#define NOISE_PRIOR  4.0  /* variance over mean, of token counts */
#define SPREAD_PRIOR 0.3  /* standard deviation over mean */
#define PRIOR_WEIGHT 0.5  /* windows that the priors count for */
#define SWITCH_GAIN  0.95 /* another predictor must be this much better */

enum predictor {
    EMA5, /* averages that keep 0.5, */
    LAST,
    EMA7, /* 0.7 */
    EMA9, /* and 0.9 of the old */
    MEAN, TREND, QUANTILE, /* of the newest windows; the upper quartile */
    PRIOR, /* the mean of all windows */
    N_PREDICTORS
};
static const double shrinkage[] = { 0.2, 0, 0.5, 0.8 };
#define N_SHRINKAGES (sizeof shrinkage / sizeof *shrinkage)
typedef double each_shrinkage __attribute__((vector_size(sizeof shrinkage)));

struct forecast {
    uint32_t n_experts, n_windows;
    uint32_t predictor, shrink;          /* believed */
    double  *window;                     /* (WINDOWS, n_experts), a ring */
    double  *average;                    /* (3, n_experts) keeps 0.5, 0.7, 0.9 of the old */
    double  *long_mean;                  /* (n_experts) */
    double  *said;                       /* (N_PREDICTORS, n_experts) about the next window */
    double   score[N_PREDICTORS][N_SHRINKAGES], score_weight;
    double   noise_sum, spread_sum, error_weight;
    bool     is_counts;                  /* all loads so far are whole numbers */
    struct belief belief;
};

struct forecast *forecast_create(uint32_t n_experts)
{
    struct forecast *f = xcalloc(1, sizeof *f);
    f->n_experts = n_experts;
    f->is_counts = true;
    f->window = xcalloc((size_t)WINDOWS * n_experts, sizeof *f->window);
    f->average = xcalloc((size_t)3 * n_experts, sizeof *f->average);
    f->long_mean = xcalloc(n_experts, sizeof *f->long_mean);
    f->said = xcalloc((size_t)N_PREDICTORS * n_experts, sizeof *f->said);
    f->belief.n_experts = n_experts;
    f->belief.mean = xcalloc(n_experts, sizeof *f->belief.mean);
    f->belief.sd = xcalloc(n_experts, sizeof *f->belief.sd);
    return f;
}

void forecast_destroy(struct forecast *f)
{
    if (!f)
        return;
    free(f->window);
    free(f->average);
    free(f->long_mean);
    free(f->said);
    free(f->belief.mean);
    free(f->belief.sd);
    free(f);
}

static double mean_of(const double *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i];
    return sum / n;
}

static double shrink(double x, double mean, uint32_t s)
{
    return x + shrinkage[s] * (mean - x);
}

/* ---- testing what was said ------------------------------------------------------------------- */

/* Of one predictor, with all shrinkages side by side. */
static void score_predictor(struct forecast *f, uint32_t predictor, const double *load,
                            double mean)
{
    const double *said = f->said + (size_t)predictor * f->n_experts;
    /* A layer may have had more or fewer tokens: what counts is how they spread. */
    double m = mean_of(said, f->n_experts), scale = m > 0 ? mean / m : 0;
    struct { each_shrinkage s, sum; } all = { .sum = { 0 } };
    memcpy(&all.s, shrinkage, sizeof all.s);
    for (uint32_t e = 0; e < f->n_experts; e++) {
        double base = said[e] * scale;
        each_shrinkage x = base + all.s * (mean - base), d = x - load[e];
        all.sum += d * d / (x + mean);
    }
    for (uint32_t s = 0; s < N_SHRINKAGES; s++)
        f->score[predictor][s] =
            f->score[predictor][s] * SCORE_DECAY + all.sum[s] / (mean * f->n_experts);
}

static void score(struct forecast *f, const double *load, double mean)
{
    f->score_weight = f->score_weight * SCORE_DECAY + 1;
    for (uint32_t p = 0; p < N_PREDICTORS; p++)
        score_predictor(f, p, load, mean);
}

static void choose(struct forecast *f)
{
    for (uint32_t p = 0; p < N_PREDICTORS; p++)
        for (uint32_t s = 0; s < N_SHRINKAGES; s++)
            if (f->score[p][s] < SWITCH_GAIN * f->score[f->predictor][f->shrink]) {
                f->predictor = p;
                f->shrink = s;
            }
}

/* Cold experts tell the noise, hot ones the spread. */
static void learn_error(struct forecast *f, const double *load, double mean)
{
    double cold_error = 0, cold = 0, hot_error = 0, hot = 0, hot_square = 0;
    double m = mean_of(f->belief.mean, f->n_experts), scale = m > 0 ? mean / m : 0;
    for (uint32_t e = 0; e < f->n_experts; e++) {
        double x = f->belief.mean[e] * scale, d = load[e] - x;
        if (x < mean) {
            cold_error += d * d;
            cold += x;
        } else {
            hot_error += d * d;
            hot += x;
            hot_square += x * x;
        }
    }
    double noise = f->is_counts && cold > 0 ? fmin(cold_error / cold, 2 * NOISE_PRIOR) : 0;
    double spread = hot_square > 0 ? fmax(hot_error - noise * hot, 0) / hot_square : 0;
    f->noise_sum = f->noise_sum * SCORE_DECAY + noise;
    f->spread_sum = f->spread_sum * SCORE_DECAY + spread;
    f->error_weight = f->error_weight * SCORE_DECAY + 1;
}

/* ---- teaching -------------------------------------------------------------------------------- */

static void sort_few(double *x, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        double y = x[i];
        uint32_t k = i;
        for (; k > 0 && x[k - 1] > y; k--)
            x[k] = x[k - 1];
        x[k] = y;
    }
}

/* Mean, least-squares line one window ahead, and third quarter of an expert's newest windows. */
static void say_from_windows(struct forecast *f, uint32_t e)
{
    uint32_t n = f->n_windows < WINDOWS ? f->n_windows : WINDOWS;
    double x[WINDOWS], sum = 0, slope = 0, spread = 0;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = f->window[(size_t)((f->n_windows - n + i) % WINDOWS) * f->n_experts + e];
        sum += x[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        double t = i - (n - 1) / 2.0;
        slope += t * x[i];
        spread += t * t;
    }
    double ahead = n > 1 ? slope / spread * ((n + 1) / 2.0) : 0;
    f->said[(size_t)MEAN * f->n_experts + e] = sum / n;
    f->said[(size_t)TREND * f->n_experts + e] = fmax(sum / n + ahead, 0);
    sort_few(x, n);
    f->said[(size_t)QUANTILE * f->n_experts + e] = x[(3 * n) / 4 < n ? (3 * n) / 4 : n - 1];
}

static void teach(struct forecast *f, const double *load)
{
    static const double keep[] = { 0.5, 0.7, 0.9 };
    static const enum predictor row[] = { EMA5, EMA7, EMA9 };
    memcpy(f->window + (size_t)(f->n_windows % WINDOWS) * f->n_experts, load,
           f->n_experts * sizeof *load);
    f->n_windows++;
    for (uint32_t e = 0; e < f->n_experts; e++) {
        for (int i = 0; i < 3; i++) {
            double *a = &f->average[(size_t)i * f->n_experts + e];
            *a = f->n_windows == 1 ? load[e] : keep[i] * *a + (1 - keep[i]) * load[e];
            f->said[(size_t)row[i] * f->n_experts + e] = *a;
        }
        f->long_mean[e] += (load[e] - f->long_mean[e]) / f->n_windows;
        f->said[(size_t)LAST * f->n_experts + e] = load[e];
        f->said[(size_t)PRIOR * f->n_experts + e] = f->long_mean[e];
        say_from_windows(f, e);
    }
}

static void believe(struct forecast *f, double mean)
{
    const double *said = f->said + (size_t)f->predictor * f->n_experts;
    double m = mean_of(said, f->n_experts), scale = m > 0 ? mean / m : 0;
    double w = f->error_weight + PRIOR_WEIGHT;
    double noise = f->is_counts ? (f->noise_sum + PRIOR_WEIGHT * NOISE_PRIOR) / w : 0;
    double spread2 = (f->spread_sum + PRIOR_WEIGHT * SPREAD_PRIOR * SPREAD_PRIOR) / w;
    double all = 0, drift = 0;
    for (uint32_t e = 0; e < f->n_experts; e++) {
        double x = shrink(said[e] * scale, mean, f->shrink);
        f->belief.mean[e] = x;
        f->belief.sd[e] = sqrt(noise * x + spread2 * x * x);
        drift += spread2 * x * x;
        all += noise * x + spread2 * x * x;
    }
    f->belief.drift = all > 0 ? drift / all : 0;
}

void forecast_add(struct forecast *f, const double *load)
{
    double mean = mean_of(load, f->n_experts);
    if (!(mean > 0))
        return;
    for (uint32_t e = 0; e < f->n_experts && f->is_counts; e++)
        f->is_counts = load[e] == floor(load[e]);
    if (f->n_windows) {
        learn_error(f, load, mean);
        score(f, load, mean);
        choose(f);
    }
    teach(f, load);
    believe(f, mean);
}

uint32_t forecast_n_windows(const struct forecast *f)
{
    return f->n_windows;
}

const double *forecast_last(const struct forecast *f)
{
    uint32_t i = f->n_windows ? (f->n_windows - 1) % WINDOWS : 0;
    return f->window + (size_t)i * f->n_experts;
}

const struct belief *forecast_belief(const struct forecast *f)
{
    return &f->belief;
}
