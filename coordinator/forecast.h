/* forecast.h - what the next window of one layer will bring, and how wrong that may be
 *
 * Several simple predictors run side by side; the one that would have been best on the windows so
 * far is believed, and its errors say how much. No predictor is best for all layers. */
#ifndef COORDINATOR_FORECAST_H
#define COORDINATOR_FORECAST_H

#include "coordinator/scenario.h"

struct forecast;

struct forecast *forecast_create(uint32_t n_experts);
void forecast_destroy(struct forecast *f);

/* One more window, tokens per expert: finite, >= 0. A window without any tokens is ignored. */
void forecast_add(struct forecast *f, const double *load);

uint32_t forecast_n_windows(const struct forecast *f);

/* The newest window; lives until the next forecast_add. Before the first: zeros. */
const double *forecast_last(const struct forecast *f);

/* What is believed of the next window. Lives until the next forecast_add. */
const struct belief *forecast_belief(const struct forecast *f);

#endif
