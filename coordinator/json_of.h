/* json_of.h - what the coordinator says, as JSON: to clients' --json and over HTTP alike
 *
 * Each gives a value of its own, ended with json_destroy. docs/cli.md tells what keys mean. */
#ifndef COORDINATOR_JSON_OF_H
#define COORDINATOR_JSON_OF_H

#include "common/json.h"
#include "proto/ballast.pb-c.h"

/* {"apiVersion", "kind", "meta", "items"}, and the members of object with the first three; both
 * take what they are given. */
struct json *json_of_list(const char *kind, uint64_t seq, bool truncated, struct json *items);
struct json *json_of_one(const char *kind, uint64_t seq, struct json *object);

struct json *json_of_job(const Ballast__Job *job);
/* With its specification and newest events, in its envelope. */
struct json *json_of_job_show(const Ballast__JobShowReply *reply);
/* The job file's keys, nested as in the file. */
struct json *json_of_spec(const Ballast__JobSpec *spec);
struct json *json_of_worker(const Ballast__Worker *worker);
struct json *json_of_event(const Ballast__Event *event);
struct json *json_of_step(const Ballast__StepReport *step);
/* Tokens of a layer's experts in a window. */
struct json *json_of_layer_load(const Ballast__LayerExperts *layer);
/* Imbalance and load of devices, window after window. */
struct json *json_of_load_history(const Ballast__ExpertsReply *reply);
/* A plan to move experts and what became of it. */
struct json *json_of_rebalance(const Ballast__RebalanceEntry *entry);

#endif
