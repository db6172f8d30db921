/* http.c - libmicrohttpd without threads: its epoll descriptor is one of the loop's */
#include "coordinator/http.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <microhttpd.h>
#include <openssl/crypto.h>
#include <uv.h>

#include "common/mem.h"

#define IDLE_S        30u
#define LOOK_MS       1000u
#define REQUEST_BYTES (32u << 10) /* of a connection: its request line and headers */
#define ADDRESS_BYTES 64

struct http {
    struct MHD_Daemon *daemon;
    uv_poll_t  poll;
    uv_timer_t timer;
    unsigned   n_handles; /* not closed yet */
    char       address[ADDRESS_BYTES];
    char      *token; /* owned; NULL: none */
    http_get   get;
    void      *context;
    size_t     n_unanswered;
};

struct http_request {
    struct http *http;
    struct MHD_Connection *connection;
    char *path;
    struct MHD_Response *response; /* NULL: not answered yet */
    unsigned status;
    bool is_head_read, is_suspended;
};

/* ---- addresses ------------------------------------------------------------------------------- */

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* "IP:PORT" or "[IP]:PORT" into numbers; false if it is neither. */
static bool parse_address(const char *text, union address *out)
{
    char ip[ADDRESS_BYTES], *end;
    const char *colon = strrchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : 0;
    if (!n || n >= sizeof ip || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return false;
    unsigned long port = strtoul(colon + 1, &end, 10);
    bool is_v6 = text[0] == '[' && text[n - 1] == ']';
    snprintf(ip, sizeof ip, "%.*s", (int)(is_v6 ? n - 2 : n), text + is_v6);
    memset(out, 0, sizeof *out);
    if (port > 65535)
        return false;
    if (is_v6 && inet_pton(AF_INET6, ip, &out->v6.sin6_addr) == 1) {
        out->v6.sin6_family = AF_INET6;
        out->v6.sin6_port = htons((uint16_t)port);
        return true;
    }
    if (!is_v6 && inet_pton(AF_INET, ip, &out->v4.sin_addr) == 1) {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons((uint16_t)port);
        return true;
    }
    return false;
}

static bool is_loopback(const union address *a)
{
    return a->any.sa_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr)
                                        : ntohl(a->v4.sin_addr.s_addr) >> 24 == 127;
}

int http_address_check(const char *address, bool has_token, struct err *err)
{
    union address a;
    if (!parse_address(address, &a))
        return err_set(err, -EINVAL, "'%s': expected IP:PORT or [IP]:PORT, as in 127.0.0.1:9477",
                       address);
    if (!has_token && !is_loopback(&a))
        return err_set(err, -EINVAL, "'%s' is not loopback: other machines may ask only with a "
                       "token, set http.token", address);
    return 0;
}

static int open_socket(const char *address, struct http *h, struct err *err)
{
    union address a;
    socklen_t n = sizeof a;
    char ip[INET6_ADDRSTRLEN];
    int on = 1;
    if (!parse_address(address, &a))
        return http_address_check(address, true, err);
    bool is_v6 = a.any.sa_family == AF_INET6;
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, &a.any, is_v6 ? sizeof a.v6 : sizeof a.v4) || listen(fd, 64) ||
        getsockname(fd, &a.any, &n)) {
        int rc = err_set(err, -errno, "http: cannot listen on %s: %s", address, strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    inet_ntop(a.any.sa_family, is_v6 ? (void *)&a.v6.sin6_addr : &a.v4.sin_addr, ip, sizeof ip);
    snprintf(h->address, sizeof h->address, is_v6 ? "[%s]:%u" : "%s:%u", ip,
             ntohs(is_v6 ? a.v6.sin6_port : a.v4.sin_port));
    return fd;
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void on_time(uv_timer_t *timer);

/* With all connections taken it does not listen, and begins again only when it runs. */
static void run(struct http *h)
{
    MHD_UNSIGNED_LONG_LONG wait_ms;
    MHD_run(h->daemon);
    if (MHD_get_timeout(h->daemon, &wait_ms) != MHD_YES || wait_ms > LOOK_MS)
        wait_ms = LOOK_MS;
    uv_timer_start(&h->timer, on_time, wait_ms, 0);
}

static void on_time(uv_timer_t *timer)
{
    run(timer->data);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    run(poll->data);
}

/* ---- a request ------------------------------------------------------------------------------- */

const char *http_path(const struct http_request *r)
{
    return r->path;
}

const char *http_argument(const struct http_request *r, const char *name)
{
    return MHD_lookup_connection_value(r->connection, MHD_GET_ARGUMENT_KIND, name);
}

static const char *header(const struct http_request *r, const char *name)
{
    return MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND, name);
}

static bool is_token(const struct http *h, const char *text)
{
    size_t n = strlen(h->token);
    return text && strlen(text) == n && !CRYPTO_memcmp(text, h->token, n);
}

static bool has_token(const struct http_request *r)
{
    static const char bearer[] = "Bearer ";
    const char *given = header(r, MHD_HTTP_HEADER_AUTHORIZATION);
    char *password = NULL, *user;
    if (given && !strncasecmp(given, bearer, sizeof bearer - 1))
        return is_token(r->http, given + sizeof bearer - 1);
    user = MHD_basic_auth_get_username_password(r->connection, &password);
    bool is_right = user && is_token(r->http, password);
    MHD_free(user);
    MHD_free(password);
    return is_right;
}

/* A name that somebody's page gave this machine is none of ours. */
static bool names_this_machine(const char *host)
{
    char name[ADDRESS_BYTES];
    unsigned char bytes[sizeof(struct in6_addr)];
    size_t n = host[0] == '[' ? strcspn(host, "]") : strcspn(host, ":");
    snprintf(name, sizeof name, "%.*s", n < sizeof name ? (int)n : 0, host);
    return host[0] == '[' ? inet_pton(AF_INET6, name + 1, bytes) == 1
                          : !strcasecmp(name, "localhost") || inet_pton(AF_INET, name, bytes) == 1;
}

bool http_may_read(const struct http_request *r, unsigned *out_status)
{
    const char *host = header(r, MHD_HTTP_HEADER_HOST);
    *out_status = r->http->token ? MHD_HTTP_UNAUTHORIZED : MHD_HTTP_FORBIDDEN;
    return r->http->token ? has_token(r) : !host || names_this_machine(host);
}

static void add(struct MHD_Response *response, const char *name, const char *value)
{
    enum MHD_Result rc = MHD_add_response_header(response, name, value);
    assert(rc == MHD_YES);
}

void http_answer(struct http_request *r, unsigned status, const char *type, const void *bytes,
                 size_t n_bytes, unsigned age_s)
{
    char age[32];
    assert(!r->response);
    r->status = status;
    r->response = MHD_create_response_from_buffer(n_bytes, (void *)bytes, MHD_RESPMEM_MUST_COPY);
    if (!r->response)
        abort();
    snprintf(age, sizeof age, age_s ? "max-age=%u" : "no-store", age_s);
    add(r->response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    add(r->response, MHD_HTTP_HEADER_CACHE_CONTROL, age);
    add(r->response, "X-Content-Type-Options", "nosniff");
    add(r->response, "Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'");
    add(r->response, "Referrer-Policy", "no-referrer");
    if (status == MHD_HTTP_UNAUTHORIZED)
        add(r->response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Basic realm=\"ballast\"");
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        add(r->response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    if (status == MHD_HTTP_SERVICE_UNAVAILABLE)
        add(r->response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
    r->http->n_unanswered--;
    if (r->is_suspended) {
        r->is_suspended = false;
        MHD_resume_connection(r->connection);
        uv_timer_start(&r->http->timer, on_time, 0, 0); /* not here: its answer asks for more */
    }
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection,
                                  const char *url, const char *method, const char *version,
                                  const char *upload, size_t *upload_bytes, void **slot)
{
    static const char only_get[] = "only GET and HEAD\n";
    struct http *h = context;
    struct http_request *r = *slot;
    (void)version;
    (void)upload;
    if (!r) {
        *slot = r = xcalloc(1, sizeof *r);
        *r = (struct http_request){.http = h, .connection = connection, .path = xstrdup(url)};
        return MHD_YES;
    }
    if (*upload_bytes) {
        *upload_bytes = 0; /* nobody reads a body */
        return MHD_YES;
    }
    if (!r->is_head_read) {
        r->is_head_read = true;
        h->n_unanswered++;
        if (strcmp(method, MHD_HTTP_METHOD_GET) && strcmp(method, MHD_HTTP_METHOD_HEAD))
            http_answer(r, MHD_HTTP_METHOD_NOT_ALLOWED, "text/plain", only_get,
                        sizeof only_get - 1, 0);
        else
            h->get(h->context, r);
    }
    if (r->response)
        return MHD_queue_response(connection, r->status, r->response);
    r->is_suspended = true;
    MHD_suspend_connection(connection);
    return MHD_YES;
}

static void on_completed(void *context, struct MHD_Connection *connection, void **slot,
                         enum MHD_RequestTerminationCode code)
{
    struct http_request *r = *slot;
    (void)context;
    (void)connection;
    (void)code;
    if (!r)
        return;
    if (r->response)
        MHD_destroy_response(r->response);
    free(r->path);
    free(r);
    *slot = NULL;
}

/* ---- life ------------------------------------------------------------------------------------ */

int http_listen(struct uv_loop_s *loop, const char *address, const char *token, http_get get,
                void *context, struct http **out, struct err *err)
{
    struct http *h = xcalloc(1, sizeof *h);
    int fd = open_socket(address, h, err);
    if (fd < 0) {
        free(h);
        return fd;
    }
    h->token = token ? xstrdup(token) : NULL;
    h->get = get;
    h->context = context;
    h->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, on_request, h,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, HTTP_CONNECTIONS_MAX,
        MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)REQUEST_BYTES, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL, MHD_OPTION_END);
    if (!h->daemon) {
        int rc = err_set(err, -EIO, "http: cannot serve on %s (are descriptors short?)", address);
        close(fd);
        free(h->token);
        free(h);
        return rc;
    }
    int epoll = MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    uv_poll_init(loop, &h->poll, epoll);
    uv_timer_init(loop, &h->timer);
    h->n_handles = 2;
    h->poll.data = h->timer.data = h;
    uv_poll_start(&h->poll, UV_READABLE, on_ready);
    *out = h;
    return 0;
}

const char *http_address(const struct http *h)
{
    return h->address;
}

static void on_closed(uv_handle_t *handle)
{
    struct http *h = handle->data;
    if (--h->n_handles == 0)
        free(h);
}

void http_close(struct http *h)
{
    if (!h)
        return;
    assert(h->n_unanswered == 0);
    uv_close((uv_handle_t *)&h->poll, on_closed);
    uv_close((uv_handle_t *)&h->timer, on_closed);
    MHD_run(h->daemon); /* resumes what was answered last */
    MHD_stop_daemon(h->daemon);
    h->daemon = NULL;
    free(h->token);
    h->token = NULL;
}
