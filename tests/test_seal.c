/* test_seal.c - records between two ranks open in order and unchanged, or not at all; alone, and in
 * the frames of a link with somebody in the middle */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "worker/coll_wire_in.h"
#include "worker/coll_wire_out.h"
#include "worker/seal.h"
#include "tests/seed.h"

static const uint8_t secret[SEAL_SECRET_BYTES] = "a secret of two ranks, 32 bytes";
static const uint8_t other_secret[SEAL_SECRET_BYTES] = "a secret of two ranks, 32 Bytes";

/* ---- records --------------------------------------------------------------------------------- */

static void a_record_opens_where_it_belongs(void **state)
{
    static const size_t sizes[] = {0, 1, 15, 16, 17, 4096, 131072};
    uint8_t *plain = malloc(131072), *out = malloc(131072), *record = malloc(131072 + 16);
    struct seal *a = seal_create(secret, 3, 5, SEAL_CLOSES);
    struct seal *b = seal_create(secret, 3, 5, SEAL_OPENS);
    (void)state;
    for (size_t i = 0; i < 131072; i++)
        plain[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        seal_close(a, plain, sizes[k], record);
        assert_int_equal(seal_open(b, record, sizes[k], out), 0);
        assert_memory_equal(out, plain, sizes[k]);
        if (sizes[k] >= 16) /* and in the clear it is nowhere */
            assert_null(memmem(record, sizes[k] + 16, plain, 16));
        seal_close(a, plain, sizes[k], record);
        assert_int_equal(seal_open(b, record, sizes[k], record), 0); /* in place */
        assert_memory_equal(record, plain, sizes[k]);
    }
    seal_destroy(a);
    seal_destroy(b);
    free(plain);
    free(out);
    free(record);
}

/* The same bytes are never sealed alike, also not by the next key. */
static void keys_change_and_records_go_on(void **state)
{
    struct seal *a = seal_create(secret, 0, 1, SEAL_CLOSES);
    struct seal *b = seal_create(secret, 0, 1, SEAL_OPENS);
    uint8_t plain[16] = {1}, out[16], record[32], first[32];
    (void)state;
    seal_close(a, plain, 16, first);
    assert_int_equal(seal_open(b, first, 16, out), 0);
    for (uint64_t i = 1; i < SEAL_RECORDS_PER_KEY + 3; i++) {
        seal_close(a, plain, 16, record);
        if (seal_open(b, record, 16, out) < 0 || memcmp(record, first, 16) == 0)
            fail_msg("record %llu", (unsigned long long)i);
    }
    seal_destroy(a);
    seal_destroy(b);
}

static void what_is_not_the_next_record_does_not_open(void **state)
{
    enum { N = 100, FLIPPED = 1, TAG = 2, REPLAYED = 4, LEFT_OUT = 8, SHORT = 16 };
    static const struct {
        const char *says;
        int how;
        const uint8_t *secret;
        uint32_t from, to;
    } rows[] = {
        { "a flipped bit", FLIPPED, secret, 3, 5 },
        { "a flipped bit of the tag", TAG, secret, 3, 5 },
        { "one that comes again", REPLAYED, secret, 3, 5 },
        { "one was left out", LEFT_OUT, secret, 3, 5 },
        { "its end is missing", SHORT, secret, 3, 5 },
        { "another secret", 0, other_secret, 3, 5 },
        { "another sender", 0, secret, 4, 5 },
        { "the other direction", 0, secret, 5, 3 },
    };
    (void)state;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        struct seal *a = seal_create(secret, 3, 5, SEAL_CLOSES);
        struct seal *b = seal_create(rows[k].secret, rows[k].from, rows[k].to, SEAL_OPENS);
        uint8_t plain[N] = {7}, out[N], record[N + SEAL_TAG_BYTES], next[N + SEAL_TAG_BYTES];
        size_t n = rows[k].how & SHORT ? N - 1 : N;
        seal_close(a, plain, N, record);
        if (rows[k].how & REPLAYED)
            assert_int_equal(seal_open(b, record, N, out), 0);
        if (rows[k].how & LEFT_OUT)
            seal_close(a, plain, N, record);
        record[40] ^= rows[k].how & FLIPPED ? 4 : 0;
        record[N + 3] ^= rows[k].how & TAG ? 1 : 0;
        if (seal_open(b, record, n, out) != -EBADMSG)
            fail_msg("%s opens", rows[k].says);
        seal_close(a, plain, N, next);
        if (seal_open(b, next, N, out) != -EBADMSG)
            fail_msg("%s: a later one opens", rows[k].says);
        seal_destroy(a);
        seal_destroy(b);
    }
}

/* ---- links ----------------------------------------------------------------------------------- */

enum { FIRST = 3000, SECOND = 5000, ROOM = 64 << 10 };

/* Out and in of a link, and what went from one to the other on its way to be changed. */
struct link {
    struct wire_out out;
    struct wire_in in;
    int from_out, to_in;
    uint8_t sent[FIRST], also_sent[SECOND], got[FIRST], also_got[SECOND];
    struct wire_ticket out_ticket, in_ticket, also_ticket;
    uint8_t bytes[ROOM];
    size_t n;
};

static struct link *new_link(void)
{
    struct link *l = calloc(1, sizeof *l);
    int a[2], b[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, a), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, b), 0);
    l->from_out = a[1];
    l->to_in = b[0];
    wire_out_init(&l->out);
    wire_in_init(&l->in);
    wire_out_open(&l->out, a[0], seal_create(secret, 0, 1, SEAL_CLOSES), 0);
    assert_int_equal(wire_out_push(&l->out), 0);
    struct greeting g;
    struct frame hello;
    struct seal *s = seal_create(secret, 0, 1, SEAL_OPENS);
    assert_int_equal(recv(l->from_out, &g, sizeof g, 0), sizeof g);
    assert_true(g.magic == GREETING_MAGIC && g.rank == 0);
    assert_int_equal(seal_open(s, g.hello, sizeof hello, &hello), 0);
    assert_int_equal(hello.kind, FRAME_HELLO);
    wire_in_open(&l->in, b[1], s);
    return l;
}

static void end_link(struct link *l)
{
    wire_out_fini(&l->out);
    wire_in_fini(&l->in);
    close(l->from_out);
    close(l->to_in);
    free(l);
}

static void post_send(struct link *l, uint64_t tag, const uint8_t *data, size_t n)
{
    struct wire_out_post *p = calloc(1, sizeof *p);
    *p = (struct wire_out_post){.tag = tag, .data = data, .n = n, .ticket = &l->out_ticket};
    l->out_ticket.n_open++;
    wire_out_add(&l->out, p);
}

static void expect(struct link *l, uint64_t tag, uint8_t *data, size_t n, struct wire_ticket *t)
{
    struct wire_in_post *p = calloc(1, sizeof *p);
    *p = (struct wire_in_post){.tag = tag, .data = data, .n = n, .ticket = t};
    t->n_open++;
    wire_in_expect(&l->in, p);
}

/* Two messages and the goodbye, as they lie in the middle. */
static void send_two(struct link *l)
{
    for (size_t i = 0; i < FIRST; i++)
        l->sent[i] = (uint8_t)(i * 3);
    for (size_t i = 0; i < SECOND; i++)
        l->also_sent[i] = (uint8_t)(i * 5 + 1);
    post_send(l, 11, l->sent, FIRST);
    post_send(l, 12, l->also_sent, SECOND);
    assert_int_equal(wire_out_push(&l->out), 0);
    assert_true(l->out_ticket.n_open == 0); /* sealed */
    wire_out_say_bye(&l->out);
    assert_int_equal(wire_out_push(&l->out), 0);
    l->n = (size_t)recv(l->from_out, l->bytes, ROOM, 0);
    assert_int_equal(l->n, 3 * FRAME_HEAD_BYTES + FIRST + SECOND + 2 * SEAL_TAG_BYTES);
}

/* Whatever way the bytes are cut, and whether they are expected before or after they come. */
static void messages_come_whole(void **state)
{
    uint32_t seed = (uint32_t)test_seed();
    (void)state;
    srand(seed);
    for (int k = 0; k < 200; k++) {
        struct link *l = new_link();
        int when = rand() % 3, rc = 0;
        send_two(l);
        if (when == 0)
            expect(l, 12, l->also_got, SECOND, &l->also_ticket);
        if (when <= 1)
            expect(l, 11, l->got, FIRST, &l->in_ticket);
        for (size_t at = 0, n; at < l->n; at += n) {
            n = (size_t)(rand() % (rand() % 4 ? 60 : 4000)) + 1;
            n = n < l->n - at ? n : l->n - at;
            assert_int_equal(send(l->to_in, l->bytes + at, n, 0), n);
            while ((rc = wire_in_pull(&l->in)) == 0)
                ;
            assert_int_equal(rc, -EAGAIN);
            if (at < 4000 && at + n >= 4000 && when == 1)
                expect(l, 12, l->also_got, SECOND, &l->also_ticket);
        }
        if (when == 2) {
            expect(l, 12, l->also_got, SECOND, &l->also_ticket);
            expect(l, 11, l->got, FIRST, &l->in_ticket);
        }
        assert_true(l->in_ticket.n_open == 0 && l->also_ticket.n_open == 0);
        assert_true(l->in.has_left && l->in.aside_bytes == 0);
        assert_memory_equal(l->got, l->sent, FIRST);
        assert_memory_equal(l->also_got, l->also_sent, SECOND);
        end_link(l);
    }
}

/* More than is kept aside waits in the kernel, and comes when it is asked for. */
static void what_nobody_asks_for_is_bounded(void **state)
{
    enum { N = 8 << 20 };
    struct link *l = new_link();
    uint8_t *sent = malloc(N), *got = malloc(N), *some = malloc(1 << 16);
    int rc = 0, n_full = 0;
    (void)state;
    for (size_t i = 0; i < N; i++)
        sent[i] = (uint8_t)(i * 11 + i / 4096);
    post_send(l, 20, sent, N);
    for (int turn = 0; turn < 100000 && l->in_ticket.n_open + (n_full == 0) > 0; turn++) {
        wire_out_push(&l->out);
        ssize_t n = n_full == 0 || rc != -ENOBUFS ? recv(l->from_out, some, 1 << 16, MSG_DONTWAIT)
                                                  : 0;
        if (n > 0)
            assert_int_equal(send(l->to_in, some, (size_t)n, 0), n);
        while ((rc = wire_in_pull(&l->in)) == 0)
            ;
        assert_true(rc == -EAGAIN || rc == -ENOBUFS);
        assert_true(l->in.aside_bytes <= WIRE_ASIDE_BYTES + WIRE_PIECE_BYTES + 256);
        if (rc == -ENOBUFS && n_full++ == 0)
            expect(l, 20, got, N, &l->in_ticket);
    }
    assert_int_equal(n_full, 1);
    assert_true(l->in_ticket.n_open == 0 && l->in.aside_bytes == 0);
    assert_memory_equal(got, sent, N);
    free(sent);
    free(got);
    free(some);
    end_link(l);
}

static void flip_head(struct link *l)
{
    l->bytes[5] ^= 1; /* of what says how much follows */
}

static void flip_piece(struct link *l)
{
    l->bytes[FRAME_HEAD_BYTES + 100] ^= 0x80;
}

static void replay(struct link *l)
{
    size_t n = FRAME_HEAD_BYTES + FIRST + SEAL_TAG_BYTES;
    memmove(l->bytes + n, l->bytes, l->n);
    l->n += n;
}

static void leave_one_out(struct link *l)
{
    size_t n = FRAME_HEAD_BYTES + FIRST + SEAL_TAG_BYTES;
    l->n -= n;
    memmove(l->bytes, l->bytes + n, l->n);
}

static void put_in(struct link *l)
{
    memmove(l->bytes + 200, l->bytes, l->n);
    memset(l->bytes, 0x5a, 200);
    l->n += 200;
}

static void cut_in_a_piece(struct link *l)
{
    l->n = FRAME_HEAD_BYTES + 1000;
}

static void cut_between_frames(struct link *l)
{
    l->n = FRAME_HEAD_BYTES + FIRST + SEAL_TAG_BYTES;
}

/* One who changes what goes by gets nothing delivered but what was sent before. */
static void what_was_changed_is_refused(void **state)
{
    static const struct {
        const char *says;
        void (*change)(struct link *l);
        int rc, n_whole;
    } rows[] = {
        { "a flipped bit of a head", flip_head, -EBADMSG, 0 },
        { "a flipped bit of a piece", flip_piece, -EBADMSG, 0 },
        { "a frame that comes again", replay, -EBADMSG, 1 },
        { "a frame is left out", leave_one_out, -EBADMSG, 0 },
        { "a stranger's bytes", put_in, -EBADMSG, 0 },
        { "cut off in a piece", cut_in_a_piece, -EPIPE, 0 },
        { "cut off between frames", cut_between_frames, -EPIPE, 1 },
    };
    (void)state;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        struct link *l = new_link();
        int rc;
        send_two(l);
        rows[k].change(l);
        expect(l, 11, l->got, FIRST, &l->in_ticket);
        expect(l, 12, l->also_got, SECOND, &l->also_ticket);
        assert_int_equal(send(l->to_in, l->bytes, l->n, 0), l->n);
        shutdown(l->to_in, SHUT_RDWR);
        while ((rc = wire_in_pull(&l->in)) == 0)
            ;
        if (rc != rows[k].rc || l->in.has_left)
            fail_msg("%s: %d", rows[k].says, rc);
        if (l->in_ticket.n_open != (rows[k].n_whole < 1) || l->also_ticket.n_open != 1)
            fail_msg("%s: what arrived is wrong", rows[k].says);
        if (rc == -EBADMSG) /* for good */
            assert_int_equal(wire_in_pull(&l->in), -EBADMSG);
        end_link(l);
    }
}

/* A head that opens, and says what cannot be, is refused before anything is made of it. */
static void what_makes_no_sense_is_refused(void **state)
{
    static const struct {
        const char *says;
        struct frame frame;
    } rows[] = {
        { "another kind", { 77, 0, 1, 0, 0 } },
        { "a second hello", { FRAME_HELLO, 0, 0, 0, 0 } },
        { "a huge message", { FRAME_DATA, 16, 1, WIRE_BYTES_MAX + 1, 0 } },
        { "a huge piece", { FRAME_DATA, WIRE_PIECE_BYTES + 1, 1, WIRE_BYTES_MAX, 0 } },
        { "more than the whole", { FRAME_DATA, 17, 1, 16, 0 } },
        { "a middle without a beginning", { FRAME_DATA, 16, 1, 64, 16 } },
        { "beyond the end", { FRAME_DATA, 16, 1, 64, UINT64_MAX - 8 } },
        { "an empty piece of something", { FRAME_DATA, 0, 1, 64, 0 } },
        { "a goodbye with a piece", { FRAME_BYE, 16, 0, 0, 0 } },
    };
    (void)state;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        struct link *l = new_link();
        uint8_t record[FRAME_HEAD_BYTES];
        seal_close(l->out.seal, &rows[k].frame, sizeof rows[k].frame, record);
        assert_int_equal(send(l->to_in, record, sizeof record, 0), sizeof record);
        if (wire_in_pull(&l->in) != -EPROTO)
            fail_msg("%s is taken", rows[k].says);
        end_link(l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_record_opens_where_it_belongs),
        cmocka_unit_test(keys_change_and_records_go_on),
        cmocka_unit_test(what_is_not_the_next_record_does_not_open),
        cmocka_unit_test(messages_come_whole),
        cmocka_unit_test(what_nobody_asks_for_is_bounded),
        cmocka_unit_test(what_was_changed_is_refused),
        cmocka_unit_test(what_makes_no_sense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
