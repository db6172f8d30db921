/* test_link.c - the link: messages both ways, hostile peers, reconnects, silence, bounded ends */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <uv.h>

#include "common/clock.h"
#include "common/link.h"
#include "common/link_address.h"
#include "common/link_key.h"
#include "common/mem.h"
#include "tests/patience.h"

struct end {
    struct link *link;
    bool      echoes;
    size_t    n_messages, n_frames, n_bytes, n_up, n_down, n_gone, n_refused, n_denied;
    enum link_denial denial; /* the last one */
    const struct keyring *admitted; /* of a server with keys */
    link_peer peer;
    char      first[64];
};

static void on_message(void *context, link_peer peer, const struct link_frame *frames,
                       size_t n_frames)
{
    struct end *e = context;
    e->n_messages++;
    e->n_frames = n_frames;
    e->peer = peer;
    e->n_bytes = 0;
    for (size_t i = 0; i < n_frames && i < LINK_FRAMES_MAX; i++)
        e->n_bytes += frames[i].n_bytes;
    snprintf(e->first, sizeof e->first, "%.*s", (int)frames[0].n_bytes,
             (const char *)frames[0].bytes);
    if (e->echoes)
        link_send(e->link, peer, frames, n_frames < LINK_FRAMES_MAX ? n_frames : LINK_FRAMES_MAX);
}

static void on_connection(void *context, bool is_up)
{
    struct end *e = context;
    *(is_up ? &e->n_up : &e->n_down) += 1;
}

static void on_gone(void *context, link_peer peer)
{
    (void)peer;
    ((struct end *)context)->n_gone++;
}

static void on_refused(void *context)
{
    ((struct end *)context)->n_refused++;
}

static void on_denied(void *context, enum link_denial why)
{
    struct end *e = context;
    e->n_denied++;
    e->denial = why;
}

static bool admit(void *context, const char *public_text)
{
    const struct end *e = context;
    return keyring_find(e->admitted, public_text, 0) != NULL;
}

struct net {
    uv_loop_t  loop;
    uv_timer_t timer;
    char       folder[64], address[128];
    int        port_fd; /* of tcp_net_open */
    struct end server, client;
};

static void on_timer(uv_timer_t *timer)
{
    (void)timer;
}

static void listen_on(struct net *n, struct end *e)
{
    struct link_handler h = {e, on_message, NULL, on_gone, NULL, on_refused};
    const char *addresses[] = {n->address};
    struct err err = {0};
    if (link_listen(&n->loop, addresses, 1, NULL, &h, &e->link, &err) < 0)
        fail_msg("%s", err.text);
}

static void connect_to(struct net *n, struct end *e)
{
    struct link_handler h = {e, on_message, NULL, NULL, on_connection};
    struct err err = {0};
    if (link_connect(&n->loop, n->address, NULL, &h, &e->link, &err) < 0)
        fail_msg("%s", err.text);
}

static void net_open(struct net *n)
{
    *n = (struct net){.folder = "/tmp/test_link.XXXXXX"};
    assert_non_null(mkdtemp(n->folder));
    snprintf(n->address, sizeof n->address, "ipc://%s/socket", n->folder);
    assert_int_equal(uv_loop_init(&n->loop), 0);
    uv_timer_init(&n->loop, &n->timer);
    uv_timer_start(&n->timer, on_timer, 5, 5);
    uv_unref((uv_handle_t *)&n->timer);
}

static void net_close(struct net *n)
{
    link_close(n->client.link);
    link_close(n->server.link);
    uv_close((uv_handle_t *)&n->timer, NULL);
    uv_run(&n->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&n->loop), 0);
    if (n->port_fd > 0)
        close(n->port_fd);
    else
        unlink(n->address + strlen("ipc://"));
    rmdir(n->folder);
}

/* Turns the loop until *count reaches n; false when patience ends. */
static bool turn_until(struct net *n, const size_t *count, size_t wanted)
{
    uint64_t end_ns = patience_end_ns(2);
    while (*count < wanted && clock_now_ns() < end_ns)
        uv_run(&n->loop, UV_RUN_ONCE);
    return *count >= wanted;
}

static void say(struct end *e, link_peer peer, const char *text, int expected)
{
    struct link_frame frames[2] = {{text, strlen(text)}, {"payload", 7}};
    assert_int_equal(link_send(e->link, peer, frames, 2), expected);
}

static size_t count_descriptors(void)
{
    size_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static void frames_go_there_and_back(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    n.server.echoes = true;
    connect_to(&n, &n.client);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    for (int i = 0; i < 1000; i++)
        say(&n.client, LINK_SERVER, "hello", 0);
    assert_true(turn_until(&n, &n.client.n_messages, 1000));
    assert_string_equal(n.client.first, "hello");
    assert_int_equal(n.client.n_bytes, 12);
    const struct passwd *me = getpwuid(getuid());
    assert_string_equal(link_peer_user(n.server.link, n.server.peer), me->pw_name);
    net_close(&n);
}

static void an_unconnected_client_keeps_nothing(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    connect_to(&n, &n.client);
    say(&n.client, LINK_SERVER, "hello", -EAGAIN);
    listen_on(&n, &n.server);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    say(&n.client, LINK_SERVER, "again", 0);
    assert_true(turn_until(&n, &n.server.n_messages, 1));
    assert_string_equal(n.server.first, "again");
    say(&n.server, n.server.peer + 1, "nobody", -EHOSTUNREACH);
    net_close(&n);
}

static void too_many_frames_are_counted(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    connect_to(&n, &n.client);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    struct link_frame frames[9];
    for (int i = 0; i < 9; i++)
        frames[i] = (struct link_frame){"x", 1};
    assert_int_equal(link_send(n.client.link, LINK_SERVER, frames, 9), 0);
    assert_true(turn_until(&n, &n.server.n_messages, 1));
    assert_int_equal(n.server.n_frames, 9);
    assert_int_equal(n.server.n_bytes, LINK_FRAMES_MAX);
    assert_int_equal(link_stats(n.server.link).n_bad_frames, 1);
    net_close(&n);
}

/* What goes to many is theirs without a copy, and whole when its maker lets go at once. */
static void a_body_goes_to_many(void **state)
{
    (void)state;
    enum { N_BYTES = 1 << 20, N_CLIENTS = 8 };
    struct net n;
    struct end clients[N_CLIENTS] = {{0}};
    link_peer peers[N_CLIENTS];
    net_open(&n);
    listen_on(&n, &n.server);
    for (size_t i = 0; i < N_CLIENTS; i++) {
        connect_to(&n, &clients[i]);
        assert_true(turn_until(&n, &clients[i].n_up, 1));
        say(&clients[i], LINK_SERVER, "hello", 0);
        assert_true(turn_until(&n, &n.server.n_messages, (int)i + 1));
        peers[i] = n.server.peer;
    }
    struct link_body *body = link_body_create(N_BYTES);
    memset(link_body_bytes(body), 'b', N_BYTES);
    struct link_frame frame = {link_body_bytes(body), N_BYTES, body};
    for (size_t i = 0; i < N_CLIENTS; i++)
        assert_int_equal(link_send(n.server.link, peers[i], &frame, 1), 0);
    assert_int_equal(link_send(n.server.link, n.server.peer + 1, &frame, 1), -EHOSTUNREACH);
    link_body_release(body);
    for (size_t i = 0; i < N_CLIENTS; i++) {
        assert_true(turn_until(&n, &clients[i].n_messages, 1));
        assert_int_equal(clients[i].n_bytes, N_BYTES);
        assert_int_equal(strspn(clients[i].first, "b"), sizeof clients[i].first - 1);
        link_close(clients[i].link);
    }
    net_close(&n);
}

static void an_oversize_peer_is_cut_off(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    connect_to(&n, &n.client);
    struct end good = {0};
    connect_to(&n, &good);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    char *big = xcalloc(1, LOAD_BYTES_MAX + 1);
    struct link_frame frame = {big, LOAD_BYTES_MAX + 1};
    assert_int_equal(link_send(n.client.link, LINK_SERVER, &frame, 1), 0);
    assert_true(turn_until(&n, &n.client.n_down, 1));
    assert_int_equal(n.server.n_messages, 0);
    assert_true(turn_until(&n, &good.n_up, 1));
    say(&good, LINK_SERVER, "fine", 0);
    assert_true(turn_until(&n, &n.server.n_messages, 1));
    free(big);
    link_close(good.link);
    net_close(&n);
}

/* A peer that never reads: its queue fills, it is dropped and counted, memory stays bounded. */
static void a_slow_peer_is_dropped(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    uv_loop_t other; /* never turned after the handshake, so its link never reads */
    uv_loop_init(&other);
    struct link_handler h = {&n.client, on_message, NULL, NULL, on_connection};
    assert_int_equal(link_connect(&other, n.address, NULL, &h, &n.client.link, NULL), 0);
    while (!n.client.n_up)
        uv_run(&other, UV_RUN_NOWAIT);
    say(&n.client, LINK_SERVER, "hello", 0);
    assert_true(turn_until(&n, &n.server.n_messages, 1));
    char block[16384] = {0};
    struct link_frame frame = {block, sizeof block};
    int rc = 0;
    size_t sent = 0;
    for (; rc == 0 && sent < 100000; sent++)
        rc = link_send(n.server.link, n.server.peer, &frame, 1);
    assert_int_equal(rc, -ENOBUFS);
    assert_true(sent < 4000);
    assert_int_equal(n.server.n_gone, 1);
    assert_int_equal(link_stats(n.server.link).n_dropped_slow, 1);
    assert_int_equal(link_stats(n.server.link).n_peers, 0);
    link_close(n.client.link);
    n.client.link = NULL;
    uv_run(&other, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&other), 0);
    net_close(&n);
}

static void reconnects_leak_no_descriptor(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    n.server.echoes = true;
    size_t n_before = 0;
    for (int i = 0; i < 500; i++) {
        struct end e = {0};
        connect_to(&n, &e);
        assert_true(turn_until(&n, &e.n_up, 1));
        say(&e, LINK_SERVER, "hello", 0);
        assert_true(turn_until(&n, &e.n_messages, 1));
        link_close(e.link);
        for (int turn = 0; turn < 3; turn++)
            uv_run(&n.loop, UV_RUN_NOWAIT);
        if (i == 50)
            n_before = count_descriptors();
    }
    uint64_t end_ns = patience_end_ns(1); /* ZeroMQ's threads close the last ones */
    while (count_descriptors() > n_before + 20 && clock_now_ns() < end_ns)
        usleep(1000);
    assert_true(count_descriptors() <= n_before + 20);
    net_close(&n);
}

static void a_server_that_comes_back_is_found(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    connect_to(&n, &n.client);
    for (size_t round = 1; round <= 5; round++) {
        assert_true(turn_until(&n, &n.client.n_up, round));
        say(&n.client, LINK_SERVER, "hello", 0);
        assert_true(turn_until(&n, &n.server.n_messages, round));
        link_close(n.server.link);
        assert_true(turn_until(&n, &n.client.n_down, round));
        listen_on(&n, &n.server);
    }
    net_close(&n);
}

static int connect_raw(const struct net *n)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strcpy(a.sun_path, n->address + strlen("ipc://"));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Connections until no descriptor is left, which ends a process that leaves ZeroMQ to itself. */
static void descriptors_for_the_rest_are_kept(void **state)
{
    (void)state;
    struct net n;
    struct rlimit old, low;
    int fds[256];
    size_t n_fds = 0;
    getrlimit(RLIMIT_NOFILE, &old);
    low = (struct rlimit){256, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    net_open(&n);
    n.server.echoes = true;
    listen_on(&n, &n.server);
    while ((fds[n_fds] = connect_raw(&n)) >= 0) {
        n_fds++;
        uv_run(&n.loop, UV_RUN_NOWAIT);
        usleep(1000); /* ZeroMQ's thread takes it */
    }
    assert_true(turn_until(&n, &n.server.n_refused, LINK_DESCRIPTORS_KEPT / 2));
    for (size_t i = 0; i < n_fds; i++)
        close(fds[i]);
    connect_to(&n, &n.client);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    say(&n.client, LINK_SERVER, "hello", 0);
    assert_true(turn_until(&n, &n.client.n_messages, 1));
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    net_close(&n);
}

static void a_process_without_descriptors_is_told(void **state)
{
    (void)state;
    struct net n;
    struct rlimit old, low;
    struct err err = {0};
    struct link_handler h = {&n.client, on_message, NULL, NULL, NULL};
    net_open(&n);
    getrlimit(RLIMIT_NOFILE, &old);
    low = (struct rlimit){20, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    uv_loop_t loop;
    assert_int_equal(link_loop_init(&loop, &err), -EMFILE);
    int rc = link_connect(&n.loop, n.address, NULL, &h, &n.client.link, &err);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(rc, -EMFILE);
    assert_string_equal(err.text, "20 files may be open at once (ulimit -n), at least 32 are "
                                  "needed");
    net_close(&n);
}

/* An open link without traffic must not wake its loop: the timer of the test alone may. */
static void an_idle_link_sleeps(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    connect_to(&n, &n.client);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    uv_timer_stop(&n.timer);
    uv_timer_start(&n.timer, on_timer, 1000, 0);
    uv_ref((uv_handle_t *)&n.timer);
    uint64_t from_ns = clock_now_ns();
    int n_turns = 0;
    while (clock_now_ns() - from_ns < 900 * NS_PER_MS) {
        uv_run(&n.loop, UV_RUN_ONCE);
        n_turns++;
    }
    assert_true(n_turns <= 10);
    net_close(&n);
}

static void shutdown_with_an_unreachable_peer_ends(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    listen_on(&n, &n.server);
    connect_to(&n, &n.client);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    link_close(n.server.link);
    n.server.link = NULL;
    char block[4096] = {0};
    struct link_frame frame = {block, sizeof block};
    for (int i = 0; i < 100; i++)
        link_send(n.client.link, LINK_SERVER, &frame, 1);
    uint64_t from_ns = clock_now_ns();
    net_close(&n);
    assert_true(was_soon(from_ns, 3));
}

static void a_path_in_use_is_refused_a_dead_one_taken(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s/socket", n.folder);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    close(fd); /* the file stays, as after kill -9 */
    listen_on(&n, &n.server);
    struct link *second;
    struct err err = {0};
    const char *addresses[] = {n.address};
    struct link_handler h = {&n.client, on_message, NULL, NULL, NULL};
    assert_int_equal(link_listen(&n.loop, addresses, 1, NULL, &h, &second, &err), -EADDRINUSE);
    net_close(&n);
}

static void a_file_is_no_place_to_listen(void **state)
{
    (void)state;
    struct net n;
    net_open(&n);
    char path[256], address[300];
    snprintf(path, sizeof path, "%s/precious", n.folder);
    snprintf(address, sizeof address, "ipc://%s", path);
    FILE *f = fopen(path, "w");
    fputs("gold", f);
    fclose(f);
    struct link *l;
    struct err err = {0};
    const char *addresses[] = {address};
    struct link_handler h = {&n.client, on_message, NULL, NULL, NULL};
    assert_int_equal(link_listen(&n.loop, addresses, 1, NULL, &h, &l, &err), -EEXIST);
    assert_non_null(strstr(err.text, "no socket"));
    struct stat st;
    assert_true(lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 4);
    unlink(path);
    net_close(&n);
}

static void addresses_are_allowed_as_keys_are(void **state)
{
    (void)state;
    static const struct {
        const char *address;
        bool without_keys, with_keys;
    } rows[] = {
        {"ipc:///run/ballast/socket", true, true},
        {"tcp://127.0.0.1:7070", true, true},
        {"tcp://127.9.9.9:1", true, true},
        {"tcp://localhost:7070", true, true},
        {"tcp://[::1]:7070", true, true},
        {"tcp://10.0.0.1:7070", false, true},
        {"tcp://0.0.0.0:7070", false, true},
        {"tcp://node-1.lan:1", false, true},
        {"tcp://[fd00::1]:7070", false, true},
        {"tcp://localhost.evil.org:1", false, true},
        {"tcp://127.0.0.1.evil.org:1", false, true},
        {"tcp://*:7070", false, false},
        {"tcp://:7070", false, false},
        {"tcp://10.0.0.1", false, false},
        {"tcp://127.0.0.1:0", false, false},
        {"tcp://127.0.0.1:70000", false, false},
        {"tcp://127.0.0.1:80x", false, false},
        {"tcp://127.0.0.1:*", false, false},
        {"tcp://[::1]:+7", false, false},
        {"tcp://eth0;127.0.0.1:80", false, false},
        {"ipc://", false, false},
        {"inproc://x", false, false},
        {"", false, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int keys = 0; keys < 2; keys++) {
            struct err err = {0};
            bool is_allowed = link_address_check(rows[i].address, keys, &err) == 0;
            if (is_allowed != (keys ? rows[i].with_keys : rows[i].without_keys))
                fail_msg("'%s', keys %d: %s", rows[i].address, keys, err.text);
        }
}

static void the_user_is_what_the_kernel_says(void **state)
{
    (void)state;
    static const char *const strangers[] = {
        "127.0.0.1", "127.0.0.1:0:0:0", "[::1]:0:0:0", "", ":0:0", "0:0:0", "a:0:0:0x",
        ":99999999999:0:0", "localhost:::", "x:0::0",
    };
    for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++) {
        char *user = link_address_user(strangers[i]);
        assert_string_equal(user, "anonymous");
        free(user);
    }
    char *user = link_address_user("@:0:0:17");
    assert_string_equal(user, "root");
    free(user);
    user = link_address_user("localhost:54321987:1:1");
    assert_string_equal(user, "uid-54321987");
    free(user);
}

/* ---- keys ------------------------------------------------------------------------------------ */

static struct key a_key(const char *name, enum key_role role)
{
    struct key k = {.role = role};
    struct err err = {0};
    snprintf(k.name, sizeof k.name, "%s", name);
    if (link_key_make(k.public_text, k.secret_text, &err) < 0)
        fail_msg("%s", err.text);
    return k;
}

static void listen_with_key(struct net *n, const struct key *own, const struct keyring *admitted)
{
    struct link_handler h = {.context = &n->server, .message = on_message, .peer_gone = on_gone};
    struct link_keys keys = {.own = own, .admit = admit};
    const char *addresses[] = {n->address};
    struct err err = {0};
    n->server.admitted = admitted;
    if (link_listen(&n->loop, addresses, 1, &keys, &h, &n->server.link, &err) < 0)
        fail_msg("%s", err.text);
}

static void connect_with_key(struct net *n, struct end *e, const struct key *own,
                             const struct key *servers, size_t n_servers)
{
    struct link_handler h = {.context = e, .message = on_message, .connection = on_connection,
                             .denied = on_denied};
    struct link_keys keys = {.own = own, .servers = servers, .n_servers = n_servers};
    struct err err = {0};
    if (link_connect(&n->loop, n->address, own ? &keys : NULL, &h, &e->link, &err) < 0)
        fail_msg("%s", err.text);
}

/* On a port of loopback, which is held until net_close: nobody else is given it, and who listens
 * with SO_REUSEADDR, as ZeroMQ does, may. */
static void tcp_net_open(struct net *n)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    net_open(n);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &size), 0);
    n->port_fd = fd;
    snprintf(n->address, sizeof n->address, "tcp://127.0.0.1:%d", ntohs(a.sin_port));
}

static void who_has_a_key_comes_in(void **state)
{
    (void)state;
    struct net n;
    struct key server = a_key("c", KEY_COORDINATOR), ada = a_key("ada", KEY_USER);
    struct keyring admitted = {&ada, 1};
    tcp_net_open(&n);
    listen_with_key(&n, &server, &admitted);
    n.server.echoes = true;
    connect_with_key(&n, &n.client, &ada, &server, 1);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    say(&n.client, LINK_SERVER, "hello", 0);
    assert_true(turn_until(&n, &n.client.n_messages, 1));
    assert_string_equal(link_peer_key(n.server.link, n.server.peer), ada.public_text);
    assert_string_equal(link_peer_user(n.server.link, n.server.peer), "anonymous");

    admitted.n = 0; /* the key is revoked: nothing goes to its holder any more */
    link_forget_keys(n.server.link, admit, &n.server);
    assert_int_equal(n.server.n_gone, 1);
    struct link_frame frame = {"x", 1};
    assert_int_equal(link_send(n.server.link, n.server.peer, &frame, 1), -EHOSTUNREACH);
    net_close(&n);
}

static void strangers_are_told_why(void **state)
{
    (void)state;
    struct key server = a_key("c", KEY_COORDINATOR), ada = a_key("ada", KEY_USER);
    struct key other = a_key("other", KEY_COORDINATOR);
    struct keyring admitted = {&ada, 1}, nobody = {NULL, 0};
    const struct {
        const char *what;
        const struct key *client, *trusted;
        const struct keyring *admitted; /* NULL: a server without keys */
        enum link_denial why;
    } rows[] = {
        {"a key that is not in the list", &ada, &server, &nobody, LINK_NOT_ADMITTED},
        {"another server's key", &ada, &other, &admitted, LINK_NO_HANDSHAKE},
        {"no key", NULL, NULL, &admitted, LINK_OTHER_SECURITY},
        {"a server without keys", &ada, &server, NULL, LINK_OTHER_SECURITY},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct net n;
        tcp_net_open(&n);
        if (rows[i].admitted)
            listen_with_key(&n, &server, rows[i].admitted);
        else
            listen_on(&n, &n.server);
        connect_with_key(&n, &n.client, rows[i].client, rows[i].trusted, 1);
        if (!turn_until(&n, &n.client.n_denied, 1) || n.client.denial != rows[i].why)
            fail_msg("%s: %zu denials, the last is %d", rows[i].what, n.client.n_denied,
                     (int)n.client.denial);
        assert_int_equal(n.client.n_up, 0);
        assert_int_equal(n.server.n_messages, 0);
        net_close(&n);
    }
}

static void a_server_may_change_its_key(void **state)
{
    (void)state;
    struct net n;
    struct key keys[] = {a_key("old", KEY_COORDINATOR), a_key("new", KEY_COORDINATOR)};
    struct key ada = a_key("ada", KEY_USER);
    struct keyring admitted = {&ada, 1};
    tcp_net_open(&n);
    listen_with_key(&n, &keys[0], &admitted);
    connect_with_key(&n, &n.client, &ada, keys, 2);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    link_close(n.server.link);
    assert_true(turn_until(&n, &n.client.n_down, 1));
    for (int i = 0; i < 50; i++)
        uv_run(&n.loop, UV_RUN_NOWAIT); /* the old server is gone for good */
    n.server = (struct end){.echoes = true};
    listen_with_key(&n, &keys[1], &admitted);
    assert_true(turn_until(&n, &n.client.n_up, 2));
    say(&n.client, LINK_SERVER, "again", 0);
    assert_true(turn_until(&n, &n.client.n_messages, 1));
    net_close(&n);
}

static void kernel_and_keys_side_by_side(void **state)
{
    (void)state;
    struct net n;
    struct key server = a_key("c", KEY_COORDINATOR);
    struct keyring nobody = {NULL, 0};
    net_open(&n); /* over ipc */
    listen_with_key(&n, &server, &nobody);
    connect_to(&n, &n.client);
    assert_true(turn_until(&n, &n.client.n_up, 1));
    say(&n.client, LINK_SERVER, "hello", 0);
    assert_true(turn_until(&n, &n.server.n_messages, 1));
    char *own = link_own_user();
    assert_string_equal(link_peer_user(n.server.link, n.server.peer), own);
    assert_string_equal(link_peer_key(n.server.link, n.server.peer), "");
    free(own);
    net_close(&n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_has_a_key_comes_in),
        cmocka_unit_test(strangers_are_told_why),
        cmocka_unit_test(a_server_may_change_its_key),
        cmocka_unit_test(kernel_and_keys_side_by_side),
        cmocka_unit_test(addresses_are_allowed_as_keys_are),
        cmocka_unit_test(the_user_is_what_the_kernel_says),
        cmocka_unit_test(frames_go_there_and_back),
        cmocka_unit_test(an_unconnected_client_keeps_nothing),
        cmocka_unit_test(too_many_frames_are_counted),
        cmocka_unit_test(a_body_goes_to_many),
        cmocka_unit_test(an_oversize_peer_is_cut_off),
        cmocka_unit_test(a_slow_peer_is_dropped),
        cmocka_unit_test(reconnects_leak_no_descriptor),
        cmocka_unit_test(a_server_that_comes_back_is_found),
        cmocka_unit_test(descriptors_for_the_rest_are_kept),
        cmocka_unit_test(a_process_without_descriptors_is_told),
        cmocka_unit_test(an_idle_link_sleeps),
        cmocka_unit_test(shutdown_with_an_unreachable_peer_ends),
        cmocka_unit_test(a_path_in_use_is_refused_a_dead_one_taken),
        cmocka_unit_test(a_file_is_no_place_to_listen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
