/* ctl_screen.h - a page of lines, shown full-screen or printed once; ncurses' home */
#ifndef COORDINATOR_CTL_SCREEN_H
#define COORDINATOR_CTL_SCREEN_H

#include <stdbool.h>
#include <stddef.h>

enum page_style { PAGE_PLAIN, PAGE_TITLE, PAGE_HEAD, PAGE_GOOD, PAGE_WARN, PAGE_BAD, PAGE_DIM };

struct page_line {
    char *text; /* printable UTF-8 */
    enum page_style style;
};

/* All zero is empty; ended with page_fini. */
struct page {
    struct page_line *lines;
    size_t n_lines;
};

/* What is foreign in it is escaped. */
void page_add(struct page *p, enum page_style style, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void page_clear(struct page *p);
void page_fini(struct page *p);

/* Cut to `width` columns, without what lies beyond `height` lines. */
void page_print(const struct page *p, size_t width);

/* The terminal in full-screen mode until screen_close; false: it cannot be. */
bool screen_open(bool has_color);
void screen_close(void);
void screen_size(size_t *out_width, size_t *out_height);
void screen_show(const struct page *p);

enum screen_key { SCREEN_NOTHING, SCREEN_QUIT, SCREEN_AGAIN };
/* Waits for a key, at most that long. */
enum screen_key screen_wait(int ms);

#endif
