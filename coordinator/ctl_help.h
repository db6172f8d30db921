/* ctl_help.h - texts that --help and the manual share */
#ifndef COORDINATOR_CTL_HELP_H
#define COORDINATOR_CTL_HELP_H

#include "coordinator/ctl.h"

extern const char ctl_help_intro[], ctl_help_address[], ctl_help_codes[], ctl_help_examples[];

/* "-f, --follow", "    --sort COLUMNS" */
void ctl_option_text(const struct ctl_command *command, const struct ctl_option *o, char out[64]);
/* Is it one of the command's own; with NULL one of all commands, or of all that are remote
 * (with_remote). */
bool ctl_option_is_shown(const struct ctl_command *command, const struct ctl_option *o,
                         bool with_remote);
/* Which forms, which columns. */
void ctl_forms_help(FILE *out, const struct ctl_command *command);

#endif
