/* ctl_help.h - texts that --help and the manual share */
#ifndef COORDINATOR_CTL_HELP_H
#define COORDINATOR_CTL_HELP_H

#include "coordinator/ctl.h"

extern const char ctl_help_intro[], ctl_help_address[], ctl_help_codes[], ctl_help_examples[];

/* Prints the command's own options, left as in "-f, --follow" and "    --sort COLUMNS"; with NULL
 * those of all commands, with_remote also those of all that speak to a coordinator. */
void ctl_print_options(FILE *out, const struct ctl_command *command, bool with_remote,
                       void (*print)(FILE *out, const char *left, const char *help));
/* Which forms, which columns. */
void ctl_forms_help(FILE *out, const struct ctl_command *command);

#endif
