/* child.c - spawns this same program as a trainer and joins its three ends into one
 *
 * A process is over when it has been waited for and both its pipes have ended, because its last
 * words may still lie in them. Its group is killed first, so that they surely end; should they be
 * held open by a process that left the group, a timer gives up on them. */
#include "worker/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <uv.h>

#include "common/mem.h"
#include "worker/channel.h"

#define LAST_WORDS_MS 1000
#define READ_BYTES (64u << 10)

struct child {
    const struct child_events *events;
    void *context;
    uv_process_t process;
    uv_pipe_t channel, output;
    uv_timer_t last_words;
    struct channel_reader reader;
    bool has_exited, channel_ended, output_ended, is_over, is_destroyed;
    int exit_code, exit_signal;
    int n_handles; /* not closed yet */
    char bytes[READ_BYTES];
};

static void child_free_if_closed(uv_handle_t *handle)
{
    struct child *c = handle->data;
    if (--c->n_handles > 0)
        return;
    channel_reader_fini(&c->reader);
    free(c);
}

static void child_finish(struct child *c)
{
    if (c->is_over || c->is_destroyed)
        return;
    c->is_over = true;
    uv_timer_stop(&c->last_words);
    c->events->exited(c->context, c->exit_code, c->exit_signal);
}

static void child_finish_if_over(struct child *c)
{
    if (c->has_exited && c->channel_ended && c->output_ended)
        child_finish(c);
}

static void on_last_words_late(uv_timer_t *timer)
{
    child_finish(timer->data);
}

static void on_exit_of_process(uv_process_t *process, int64_t exit_code, int exit_signal)
{
    struct child *c = process->data;
    kill(-process->pid, SIGKILL);
    c->has_exited = true;
    c->exit_code = (int)exit_code;
    c->exit_signal = exit_signal;
    uv_timer_start(&c->last_words, on_last_words_late, LAST_WORDS_MS, 0);
    child_finish_if_over(c);
}

static void give_buffer(uv_handle_t *handle, size_t suggested, uv_buf_t *out_buf)
{
    struct child *c = handle->data;
    (void)suggested;
    *out_buf = uv_buf_init(c->bytes, sizeof c->bytes);
}

static void on_output(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct child *c = stream->data;
    if (n > 0) {
        c->events->output(c->context, buf->base, (size_t)n);
    } else if (n < 0) {
        uv_read_stop(stream);
        c->output_ended = true;
        child_finish_if_over(c);
    }
}

static void child_channel_ended(struct child *c, const char *why)
{
    uv_read_stop((uv_stream_t *)&c->channel);
    c->channel_ended = true;
    c->events->closed(c->context, why);
    child_finish_if_over(c);
}

static void on_channel(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct child *c = stream->data;
    if (n < 0) {
        child_channel_ended(c, NULL);
        return;
    }
    channel_reader_add(&c->reader, buf->base, (size_t)n);
    const uint8_t *packed = NULL;
    size_t n_packed = 0;
    struct err err = {0};
    int rc;
    while ((rc = channel_reader_next(&c->reader, &packed, &n_packed, &err)) > 0)
        c->events->message(c->context, packed, n_packed);
    if (rc < 0)
        child_channel_ended(c, err.text);
}

static void child_init_handles(uv_loop_t *loop, struct child *c)
{
    uv_pipe_init(loop, &c->channel, 0);
    uv_pipe_init(loop, &c->output, 0);
    uv_timer_init(loop, &c->last_words);
    c->channel.data = c->output.data = c->last_words.data = c->process.data = c;
    c->n_handles = 3;
}

static int child_exec(uv_loop_t *loop, struct child *c, const struct child_options *o, int out_fd)
{
    uv_stdio_container_t stdio[] = {
        {.flags = UV_IGNORE},
        {.flags = UV_INHERIT_FD, .data.fd = out_fd},
        {.flags = UV_INHERIT_FD, .data.fd = out_fd},
        {.flags = UV_CREATE_PIPE | UV_READABLE_PIPE | UV_WRITABLE_PIPE,
         .data.stream = (uv_stream_t *)&c->channel},
    };
    char *args[] = {(char *)"ballast-worker", (char *)"--trainer", (char *)o->label, NULL};
    uv_process_options_t options = {
        .exit_cb = on_exit_of_process,
        .file = "/proc/self/exe", /* this very program, even if its file was replaced */
        .args = args,
        .cwd = o->folder,
        .flags = UV_PROCESS_DETACHED,
        .stdio_count = sizeof stdio / sizeof *stdio,
        .stdio = stdio,
    };
    c->n_handles++; /* also when it fails */
    int rc = uv_spawn(loop, &c->process, &options);
    return rc;
}

int child_spawn(uv_loop_t *loop, const struct child_options *options,
                const struct child_events *events, void *context, struct child **out_child,
                struct err *err)
{
    int out_fds[2];
    if (pipe2(out_fds, O_CLOEXEC) < 0)
        return err_set(err, -errno, "no pipe for a trainer: %s", strerror(errno));
    struct child *c = xcalloc(1, sizeof *c);
    c->events = events;
    c->context = context;
    child_init_handles(loop, c);
    int rc = uv_pipe_open(&c->output, out_fds[0]);
    if (rc < 0)
        close(out_fds[0]);
    else
        rc = child_exec(loop, c, options, out_fds[1]);
    close(out_fds[1]);
    if (rc < 0) {
        c->has_exited = true; /* there is nothing to kill */
        child_destroy(c);
        return err_set(err, rc, "cannot start a trainer: %s", uv_strerror(rc));
    }
    uv_read_start((uv_stream_t *)&c->output, give_buffer, on_output);
    uv_read_start((uv_stream_t *)&c->channel, give_buffer, on_channel);
    *out_child = c;
    return 0;
}

struct write_of_child {
    uv_write_t request;
    uint8_t *bytes;
};

static void on_written(uv_write_t *request, int status)
{
    (void)status; /* a child that is gone is told by its end */
    struct write_of_child *w = request->data;
    free(w->bytes);
    free(w);
}

void child_send(struct child *c, const Ballast__TrainerMessage *message)
{
    struct write_of_child *w = xcalloc(1, sizeof *w);
    w->request.data = w;
    size_t n = channel_pack(message, &w->bytes);
    uv_buf_t buf = uv_buf_init((char *)w->bytes, (unsigned)n);
    if (c->channel_ended || uv_write(&w->request, (uv_stream_t *)&c->channel, &buf, 1, on_written))
        on_written(&w->request, UV_EPIPE);
}

void child_kill(struct child *c)
{
    if (!c->has_exited)
        kill(-c->process.pid, SIGKILL);
}

pid_t child_pid(const struct child *c)
{
    return c->process.pid;
}

void child_destroy(struct child *c)
{
    if (!c || c->is_destroyed)
        return;
    c->is_destroyed = true;
    child_kill(c);
    if (c->n_handles == 4)
        uv_close((uv_handle_t *)&c->process, child_free_if_closed);
    uv_close((uv_handle_t *)&c->channel, child_free_if_closed);
    uv_close((uv_handle_t *)&c->output, child_free_if_closed);
    uv_close((uv_handle_t *)&c->last_words, child_free_if_closed);
}
