/* http.h - answers GET over HTTP on a uv loop; libmicrohttpd's home
 *
 * Only reading is possible: other methods are refused. With a token a request needs it, as
 * "Authorization: Bearer TOKEN" or as the password of a browser's login; without one only
 * loopback addresses are listened to, and only requests that name this machine are answered, so
 * that no page from elsewhere reads through a visitor's browser. The loop's thread owns it. */
#ifndef COORDINATOR_HTTP_H
#define COORDINATOR_HTTP_H

#include <stdbool.h>
#include <stddef.h>

#include "common/err.h"

struct uv_loop_s; /* uv_loop_t */
struct http;
struct http_request;

#define HTTP_CONNECTIONS_MAX 32u /* more are closed at once */

/* Called once for each request, on the loop's thread; ends with http_answer, now or later. */
typedef void (*http_get)(void *context, struct http_request *request);

/* 0 if IP:PORT or [IP]:PORT may be listened to, else -EINVAL and why. */
int http_address_check(const char *address, bool has_token, struct err *err);

/* Listens there; port 0 is one that is free. token may be NULL; copied. Gives *out, ended with
 * http_close. */
int http_listen(struct uv_loop_s *loop, const char *address, const char *token, http_get get,
                void *context, struct http **out, struct err *err);

/* Where it listens, as one writes it in an address. */
const char *http_address(const struct http *h);

/* All requests must have been answered. The memory goes when the loop has run its close
 * callbacks. NULL is fine. */
void http_close(struct http *h);

/* "/api/v1/jobs"; lives as long as the request, as arguments do. */
const char *http_path(const struct http_request *r);
/* Of ?name=value; NULL where it is not given. */
const char *http_argument(const struct http_request *r, const char *name);

/* Whether who asks may read; else *out_status says what to answer: 401 or 403. */
bool http_may_read(const struct http_request *r, unsigned *out_status);

/* Copies bytes. age_s: for how long a browser may keep it; 0: not at all. */
void http_answer(struct http_request *r, unsigned status, const char *type, const void *bytes,
                 size_t n_bytes, unsigned age_s);

#endif
