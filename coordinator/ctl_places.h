/* ctl_places.h - placements as CSV files, every mistake with its line */
#ifndef COORDINATOR_CTL_PLACES_H
#define COORDINATOR_CTL_PLACES_H

#include "common/loads.h"
#include "common/placement.h"

/* layer,device,expert and maybe slot, share, home (1 marks an expert's home), node (not used);
 * `gpu` is another name for device. A slot counts within its device, or through all devices; an
 * expert of -1 is an empty slot. n_slots 0: as many as the fullest device has, and one spare more
 * than all experts need. Placements of the layers of l, one after the other; *out is an array that
 * the caller ends with placements_free. */
int  placements_read(const char *path, const struct loads *l, uint32_t n_devices, uint32_t n_slots,
                     struct placement **out, struct err *err);
/* Marks in out_named, (LAYERS_MAX), the layers that the file has rows of. */
int  placements_layers(const char *path, bool *out_named, struct err *err);
void placements_free(struct placement *p, uint32_t n_layers);

/* Writes what placements_read reads. */
int  placements_write(const char *path, const struct loads *l, const struct placement *p,
                      struct err *err);

#endif
