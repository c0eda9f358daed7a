// Compiled once per instruction set; SET is its name.
#include "channel_backward.h"
#include "channel_forward.h"
#include "convolution.h"
#include "delta_backward.h"
#include "delta_forward.h"
#include "gated_backward.h"
#include "gated_forward.h"
#include "scan.h"
#include "scan_backward.h"

#define JOIN(name, set) name##_##set
#define NAMED(name, set) JOIN(name, set)

extern "C" {

void NAMED(scan_forward, SET)(const Scan* s) {
    const int64_t groups = (s->channels + s->group - 1) / s->group;
    run_items(forward_item, (void*)s, s->batch * groups, s->threads);
}

void NAMED(scan_backward, SET)(const Scan* s) {
    const Partial partial(*s);
    run_items(backward_item, (void*)s, s->batch * partial.groups, s->threads);
    run_items(reduce_item, (void*)s, s->batch + s->N + 2, s->threads);
}

void NAMED(delta_forward, SET)(const Delta* d) {
    run_items(delta_forward_item, (void*)d, d->sequences * d->H, d->threads);
}

void NAMED(delta_backward, SET)(const Delta* d) {
    run_items(delta_backward_item, (void*)d, d->sequences * d->H, d->threads);
}

void NAMED(channel_forward, SET)(const Delta* d) {
    run_items(channel_forward_item, (void*)d, d->sequences * d->H, d->threads);
}

void NAMED(channel_backward, SET)(const Delta* d) {
    run_items(channel_backward_item, (void*)d, d->sequences * d->H, d->threads);
}

void NAMED(gated_forward, SET)(const Gated* d) {
    run_items(gated_forward_item, (void*)d, d->sequences * d->H, d->threads);
}

void NAMED(gated_backward, SET)(const Gated* d) {
    run_items(gated_backward_item, (void*)d, d->sequences * d->H, d->threads);
}

void NAMED(convolution_forward, SET)(const Convolution* c) {
    const int64_t blocks = (c->batch * c->T + c->rows - 1) / c->rows, across = (c->C + COLUMNS - 1) / COLUMNS;
    run_items(convolution_forward_item, (void*)c, blocks * across, c->threads);
}

void NAMED(convolution_backward, SET)(const Convolution* c) {
    const int64_t blocks = (c->batch * c->T + c->rows - 1) / c->rows, across = (c->C + COLUMNS - 1) / COLUMNS;
    run_items(convolution_backward_item, (void*)c, blocks * across, c->threads);
    if (c->partial) run_items(convolution_reduce_item, (void*)c, across, c->threads);
}
}
