/* ctl_screen.c - draws a page with ncurses, which knows the terminal and sends only what changed */
#include "coordinator/ctl_screen.h"

#include <curses.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/ctl.h"

/* ---- pages ----------------------------------------------------------------------------------- */

void page_add(struct page *p, enum page_style style, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *clean = ctl_clean_text(format, args);
    va_end(args);
    p->lines = xrealloc(p->lines, (p->n_lines + 1) * sizeof *p->lines);
    p->lines[p->n_lines++] = (struct page_line){clean, style};
}

void page_clear(struct page *p)
{
    for (size_t i = 0; i < p->n_lines; i++)
        free(p->lines[i].text);
    p->n_lines = 0;
}

void page_fini(struct page *p)
{
    page_clear(p);
    free(p->lines);
    *p = (struct page){0};
}

void page_print(const struct page *p, size_t width)
{
    for (size_t i = 0; i < p->n_lines; i++)
        printf("%.*s\n", (int)ctl_bytes_within(p->lines[i].text, width, NULL), p->lines[i].text);
}

/* ---- the screen ------------------------------------------------------------------------------ */

static const short style_colors[] = {
    [PAGE_PLAIN] = -1, [PAGE_TITLE] = -1, [PAGE_HEAD] = COLOR_CYAN, [PAGE_GOOD] = COLOR_GREEN,
    [PAGE_WARN] = COLOR_YELLOW, [PAGE_BAD] = COLOR_RED, [PAGE_DIM] = -1,
};

bool screen_open(bool has_color)
{
    SCREEN *screen = newterm(NULL, stdout, stdin); /* initscr would end the program */
    if (!screen)
        return false;
    cbreak();
    noecho();
    nonl();
    curs_set(0);
    keypad(stdscr, TRUE);
    if (has_color && has_colors()) {
        start_color();
        use_default_colors();
        for (short i = 0; i <= PAGE_DIM; i++)
            init_pair((short)(i + 1), style_colors[i], -1);
    }
    return true;
}

void screen_close(void)
{
    endwin();
}

void screen_size(size_t *out_width, size_t *out_height)
{
    int height, width;
    getmaxyx(stdscr, height, width);
    *out_width = (size_t)width;
    *out_height = (size_t)height;
}

void screen_show(const struct page *p)
{
    size_t width, height;
    screen_size(&width, &height);
    erase();
    for (size_t i = 0; i < p->n_lines && i < height; i++) {
        const struct page_line *l = &p->lines[i];
        attr_t look = l->style == PAGE_TITLE ? A_REVERSE : l->style == PAGE_HEAD ? A_BOLD
                    : l->style == PAGE_DIM ? A_DIM : A_NORMAL;
        attr_set(look, (short)(l->style + 1), NULL);
        mvaddnstr((int)i, 0, l->text, (int)ctl_bytes_within(l->text, width, NULL));
        if (l->style == PAGE_TITLE)
            for (size_t x = (size_t)getcurx(stdscr); x && x < width; x++)
                addch(' ');
    }
    attr_set(A_NORMAL, 0, NULL);
    refresh();
}

enum screen_key screen_wait(int ms)
{
    timeout(ms);
    int key = getch();
    if (key == 'q' || key == 'Q' || key == 27)
        return SCREEN_QUIT;
    return key == ERR ? SCREEN_NOTHING : SCREEN_AGAIN; /* KEY_RESIZE too: drawn anew */
}
