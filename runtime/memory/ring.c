/* The ring has slots on the device, through which blocks of the host tier pass.
 *
 * Each slot has a stream and two events: `ready` (its load is done) and `done` (no work reads
 * the slot any more). Each layer has an event `offloaded` (the contents of its buffer are in
 * the host tier). The event `planned` is recorded on the compute stream at the start of a
 * step, when the indices and the tokens of earlier steps have been written. The ring is
 * correct because each operation waits for the right events:
 *   load     waits for planned, done[slot] and offloaded[layer]; copies; records
 *            ready[slot]. A gather also waits for the load before it
 *   compute  waits for ready[slot]; reads the slot; records done[slot]
 *   offload  waits for the compute stream; copies; records offloaded[layer]
 *   append   waits for offloaded[layer]; writes to the layer's buffer
 * Source: the SparsePolicy engine of a nano-vllm fork. The ring follows its contract, but it
 * has all of the waits, and a load takes many blocks. */
#include "core/call.h"
#include "core/stream.h"

/* An offload uses the copy engine for blocks of this size and larger, if the host knows their
 * numbers. A copy of 1 MiB reaches the link's speed, and the copy engine takes no SM. */
enum { BYTES_COPY_ENGINE = 1 << 20 };

struct slot {
  kvl_stream *stream;
  kvl_event *ready, *done;
  int blocks; /* of its last load, for the trace */
  int layer;
  int span; /* its open COMPUTE span; -1: none */
};

struct span {
  kvl_event *begin, *end;
  int kind, slot, layer, blocks;
};

struct kvl_ring {
  kvl_device *device;
  kvl_tensor memory; /* [slots, blocks, ...], pages of `format` */
  kvl_format own;
  const kvl_format *format; /* of pages, without scales; NULL: what the shapes say */
  kvl_tensor moved;         /* i64 [2]: bytes that gathers and offloads moved */
  kvl_tensor moved_in, moved_out;
  int64_t bytes_in, bytes_out; /* moved by the copy engine */
  int64_t bytes_block;
  struct slot *slots;
  kvl_stream *offload;
  kvl_event **offloaded; /* [layers] */
  kvl_event *planned, *issued;
  kvl_event *last_ready; /* of the last load: gathers run one after the other */
  kvl_event *origin;     /* of the trace */
  struct span *spans;
  int num_slots, layers, spans_room, spans_used, buffer_span;
};

/* ---- open and close ------------------------------------------------------------------ */

static void trace_end(kvl_ring *r) {
  for (int i = 0; i < r->spans_room; i++) {
    kvl_event_close(r->spans[i].begin);
    kvl_event_close(r->spans[i].end);
  }
  kvl_event_close(r->origin);
  free(r->spans);
  r->spans = NULL;
  r->origin = NULL;
  r->spans_room = r->spans_used = 0;
  for (int i = 0; i < r->num_slots; i++) r->slots[i].span = -1;
  r->buffer_span = -1;
}

static int ring_sync(kvl_ring *r) {
  int status = r->offload ? kvl_stream_sync(r->offload) : KVL_OK;
  for (int i = 0; i < r->num_slots && status >= 0; i++)
    if (r->slots[i].stream) status = kvl_stream_sync(r->slots[i].stream);
  return status;
}

void kvl_ring_close(kvl_ring *r) {
  if (!r) return;
  ring_sync(r);
  trace_end(r);
  for (int i = 0; i < r->num_slots; i++) {
    kvl_event_close(r->slots[i].ready);
    kvl_event_close(r->slots[i].done);
    kvl_stream_close(r->slots[i].stream);
  }
  for (int i = 0; r->offloaded && i < r->layers; i++) kvl_event_close(r->offloaded[i]);
  kvl_event_close(r->planned);
  kvl_event_close(r->issued);
  kvl_stream_close(r->offload);
  kvl_tensor_close(&r->moved_in);
  kvl_tensor_close(&r->moved_out);
  kvl_tensor_close(&r->moved);
  kvl_tensor_close(&r->memory);
  free(r->offloaded);
  free(r->slots);
  free(r);
}

static int ring_start(kvl_ring *r) {
  kvl_device *dev = r->device;
  int64_t two = 2;
  int status = kvl_tensor_open(dev, KVL_DTYPE_I64, 1, &two, &r->moved);
  if (status >= 0) status = kvl_fill(&r->moved, 0);
  if (status >= 0) status = kvl_tensor_narrow(&r->moved, 0, 1, &r->moved_in);
  if (status >= 0) status = kvl_tensor_narrow(&r->moved, 1, 1, &r->moved_out);
  if (status >= 0) status = kvl_event_open(dev, &r->planned);
  if (status >= 0) status = kvl_event_open(dev, &r->issued);
  /* loads wait for planned, and so for the zeros of the counters */
  if (status >= 0) status = kvl_event_record(r->planned, dev->current);
  if (status >= 0) status = kvl__stream_open(dev, KVL_QUEUE_URGENT, &r->offload);
  for (int i = 0; i < r->num_slots && status >= 0; i++) {
    struct slot *slot = &r->slots[i];
    status = kvl__stream_open(dev, KVL_QUEUE_URGENT, &slot->stream);
    if (status >= 0) status = kvl_event_open(dev, &slot->ready);
    if (status >= 0) status = kvl_event_open(dev, &slot->done);
  }
  for (int i = 0; i < r->layers && status >= 0; i++)
    status = kvl_event_open(dev, &r->offloaded[i]);
  return status;
}

static void *zeroed(size_t bytes, const char *what) {
  void *p = kvl__malloc(bytes, what);
  return p ? memset(p, 0, bytes) : NULL;
}

int kvl_ring_open(const kvl_tensor *memory, const kvl_format *format, int layers,
                  kvl_ring **out) {
  KVL__NEED(out);
  struct kvl__call c = {.op = "ring"};
  if (format) kvl__arg(&c, "memory", memory, KVL__ANY, "slots blocks ...");
  else
    kvl__arg(&c, "memory", memory, KVL__CACHE, "slots blocks 2 kv_heads block_size head_dim");
  if (c.status >= 0 && (memory->shape[0] < 1 || memory->shape[0] > 32 || layers < 1))
    kvl__call_fail(&c,
                   "%lld slots and %d layers, expected 1 ... 32 slots and 1 or more layers",
                   (long long)memory->shape[0], layers);
  if (c.status >= 0 && memory->shape[1] < 1)
    kvl__call_fail(&c, "slots of %lld blocks, expected 1 or more",
                   (long long)memory->shape[1]);
  if (c.status >= 0) c.status = kvl__not_recording(memory->device, "opening a ring");
  if (c.status < 0) return c.status;
  kvl_ring *r = zeroed(sizeof *r, "a ring");
  if (!r) return KVL_ERR_NO_MEMORY;
  r->device = memory->device;
  r->memory = *memory;
  r->memory.storage->refs++;
  r->num_slots = (int)memory->shape[0];
  r->layers = layers;
  r->buffer_span = -1;
  if (format) {
    r->own = *format;
    r->own.k_scale = r->own.v_scale = NULL; /* a ring only moves pages */
    r->format = &r->own;
  }
  r->bytes_block = memory->count / (memory->shape[0] * memory->shape[1]) *
                   kvl_dtype_bytes(memory->dtype);
  r->slots = zeroed((size_t)r->num_slots * sizeof *r->slots, "a ring's slots");
  r->offloaded = zeroed((size_t)layers * sizeof *r->offloaded, "a ring's events");
  int status = KVL_ERR_NO_MEMORY;
  if (!r->slots) r->num_slots = 0;
  else
    for (int i = 0; i < r->num_slots; i++) r->slots[i].span = -1;
  if (r->slots && r->offloaded) status = ring_start(r);
  if (status < 0) kvl_ring_close(r);
  else *out = r;
  return status;
}

static int expect_ring(const kvl_ring *r, const char *op) {
  return r ? KVL_OK : kvl__fail(KVL_ERR_INVALID, "%s: the ring is closed", op);
}

/* ---- trace ----------------------------------------------------------------------------- */

/* Begins a span on `stream`. Returns its number, or -1 if the trace is full or off. */
static int span_begin(kvl_ring *r, int kind, int slot, int layer, int blocks,
                      kvl_stream *stream) {
  if (r->spans_used == r->spans_room) return -1;
  struct span *s = &r->spans[r->spans_used];
  if (kvl_event_record(s->begin, stream) < 0) return -1;
  s->kind = kind;
  s->slot = slot;
  s->layer = layer;
  s->blocks = blocks;
  return r->spans_used++;
}

static void span_end(kvl_ring *r, int span, kvl_stream *stream) {
  if (span >= 0) kvl_event_record(r->spans[span].end, stream);
}

int kvl_ring_trace(kvl_ring *r, int spans) {
  int status = expect_ring(r, "ring_trace");
  if (status >= 0) status = ring_sync(r);
  if (status < 0) return status;
  trace_end(r);
  if (spans <= 0) return KVL_OK;
  r->spans = zeroed((size_t)spans * sizeof *r->spans, "a trace");
  if (!r->spans) return KVL_ERR_NO_MEMORY;
  r->spans_room = spans;
  status = kvl_event_open(r->device, &r->origin);
  for (int i = 0; i < spans && status >= 0; i++) {
    status = kvl_event_open(r->device, &r->spans[i].begin);
    if (status >= 0) status = kvl_event_open(r->device, &r->spans[i].end);
  }
  if (status >= 0) status = kvl_event_record(r->origin, r->device->current);
  if (status < 0) trace_end(r);
  return status;
}

int kvl_ring_trace_get(kvl_ring *r, kvl_span *out, int n) {
  int count = 0, status = expect_ring(r, "ring_trace");
  if (status < 0) return status;
  for (int i = 0; i < r->spans_used && count < n; i++) {
    struct span *s = &r->spans[i];
    if (!s->end->recorded) continue; /* its end was never issued */
    kvl_span span = {
        .kind = s->kind, .slot = s->slot, .layer = s->layer, .blocks = s->blocks};
    status = kvl_event_elapsed_us(r->origin, s->begin, &span.begin_us);
    if (status >= 0) status = kvl_event_elapsed_us(r->origin, s->end, &span.end_us);
    if (status < 0) return status;
    out[count++] = span;
  }
  return count;
}

/* ---- loads ----------------------------------------------------------------------------- */

static int expect_slot(kvl_ring *r, const char *op, int slot) {
  int status = expect_ring(r, op);
  if (status < 0 || (slot >= 0 && slot < r->num_slots)) return status;
  return kvl__fail(KVL_ERR_INVALID, "%s: slot is %d, expected 0 ... %d", op, slot,
                   r->num_slots - 1);
}

static int expect_layer(kvl_ring *r, const char *op, int layer) {
  int status = expect_ring(r, op);
  if (status < 0 || (layer >= 0 && layer < r->layers)) return status;
  return kvl__fail(KVL_ERR_INVALID, "%s: layer is %d, expected 0 ... %d", op, layer,
                   r->layers - 1);
}

/* A ring moves blocks as bytes, so `cache` must have blocks like those of its slots. */
static int expect_cache(kvl_ring *r, const char *op, const kvl_tensor *cache) {
  struct kvl__call c = {.op = op};
  if (!r->format) {
    kvl__arg(&c, "memory", &r->memory, KVL__CACHE,
             "slots per_slot 2 kv_heads block_size head_dim");
    kvl__arg(&c, "cache", cache, kvl__like(&r->memory),
             "blocks 2 kv_heads block_size head_dim");
  } else if (kvl__arg(&c, "cache", cache, kvl__like(&r->memory), "blocks ...")) {
    const int64_t bytes = cache->count * kvl_dtype_bytes(cache->dtype);
    if (bytes != cache->shape[0] * r->bytes_block)
      kvl__call_fail(&c, "cache has %lld bytes for %lld blocks, expected %lld for each",
                     (long long)bytes, (long long)cache->shape[0], (long long)r->bytes_block);
  }
  return c.status;
}

/* Notes that work on `stream` uses the memory, which is not reused before this work ends. */
static void used_on(const kvl_tensor *t, const kvl_stream *stream) {
  t->storage->used |= (uint64_t)1 << stream->id;
}

/* Starts a load. After its waits, the slot's stream may write the slot and read the layer. */
static int load_begin(kvl_ring *r, int slot, int layer, int blocks, int *span) {
  struct slot *s = &r->slots[slot];
  int status = kvl_stream_wait_event(s->stream, r->planned);
  if (status >= 0) status = kvl_stream_wait_event(s->stream, s->done);
  if (status >= 0) status = kvl_stream_wait_event(s->stream, r->offloaded[layer]);
  if (status < 0) return status;
  s->blocks = blocks;
  s->layer = layer;
  *span = span_begin(r, KVL_SPAN_LOAD, slot, layer, blocks, s->stream);
  return KVL_OK;
}

static int load_end(kvl_ring *r, int slot, int span) {
  span_end(r, span, r->slots[slot].stream);
  r->last_ready = r->slots[slot].ready;
  return kvl_event_record(r->slots[slot].ready, r->slots[slot].stream);
}

/* Copies whole blocks with the copy engine, on `stream`, a run of neighbours at a time. With
 * `in`, host[blocks[i]] goes to device block i for i < n; without, it is the other way. */
static int copy_runs(kvl_ring *r, kvl_stream *stream, const kvl_tensor *host, char *device,
                     const int32_t *blocks, int n, int in) {
  kvl_device *dev = r->device;
  enum kvl_copy_kind kind = in ? KVL_COPY_FROM_HOST : KVL_COPY_TO_HOST;
  if (!kvl_tensor_is_pinned(host)) kind = KVL_COPY_LOCAL;
  for (int i = 0, run; i < n; i += run) {
    for (run = 1; i + run < n && blocks[i + run] == blocks[i] + run; run++) {}
    char *far = (char *)host->ptr + blocks[i] * r->bytes_block;
    char *near = device + i * r->bytes_block;
    int status = dev->backend->copy(dev->ctx, stream->queue, in ? near : far, in ? far : near,
                                    (size_t)(run * r->bytes_block), kind);
    if (status < 0) return kvl__device_failed(dev, status, "copying blocks");
  }
  return KVL_OK;
}

static int expect_blocks(const kvl_tensor *cache, const char *op, const int32_t *blocks,
                         int n) {
  if (n > 0 && !blocks) return kvl__fail(KVL_ERR_INVALID, "%s: blocks are missing", op);
  for (int i = 0; i < n; i++)
    if (blocks[i] < 0 || blocks[i] >= cache->shape[0])
      return kvl__fail(KVL_ERR_INVALID, "%s: block %d is %d, expected 0 ... %lld", op, i,
                       blocks[i], (long long)cache->shape[0] - 1);
  return KVL_OK;
}

int kvl_ring_load(kvl_ring *r, int slot, int layer, const kvl_tensor *cache,
                  const int32_t *blocks, int n) {
  static const char op[] = "ring_load";
  int span, status = expect_slot(r, op, slot);
  if (status >= 0) status = expect_layer(r, op, layer);
  if (status >= 0) status = expect_cache(r, op, cache);
  if (status >= 0 && (n < 0 || n > r->memory.shape[1]))
    status = kvl__fail(KVL_ERR_INVALID,
                       "%s: %d blocks, expected 0 ... %lld, the blocks of a "
                       "slot",
                       op, n, (long long)r->memory.shape[1]);
  if (status >= 0) status = expect_blocks(cache, op, blocks, n);
  if (status >= 0) status = load_begin(r, slot, layer, n, &span);
  if (status < 0) return status;
  kvl_stream *stream = r->slots[slot].stream;
  used_on(cache, stream);
  used_on(&r->memory, stream);
  char *to = (char *)r->memory.ptr + slot * r->memory.shape[1] * r->bytes_block;
  status = copy_runs(r, stream, cache, to, blocks, n, 1);
  if (status < 0) return status;
  r->bytes_in += n * r->bytes_block;
  return load_end(r, slot, span);
}

/* Calls kvl_move_blocks with `stream` as the current stream. */
static int move_on(kvl_ring *r, kvl_stream *stream, const kvl_tensor *src,
                   const kvl_tensor *from, const kvl_tensor *dst, const kvl_tensor *to,
                   const kvl_tensor *moved) {
  kvl_stream *before = r->device->current;
  r->device->current = stream;
  int status = kvl_move_blocks(src, from, dst, to, r->format, moved);
  r->device->current = before;
  return status;
}

int kvl_ring_gather(kvl_ring *r, int slot, int layer, const kvl_tensor *cache,
                    const kvl_tensor *from, const kvl_tensor *to) {
  static const char op[] = "ring_gather";
  int span, status = expect_slot(r, op, slot);
  if (status >= 0) status = expect_layer(r, op, layer);
  if (status >= 0 && (!from || !from->storage))
    status = kvl__fail(KVL_ERR_INVALID, "%s: from is missing", op);
  if (status < 0) return status;
  kvl_stream *stream = r->slots[slot].stream;
  kvl_tensor into;
  /* two gathers at once would share the link, and the first pass would wait for both */
  status = r->last_ready ? kvl_stream_wait_event(stream, r->last_ready) : KVL_OK;
  if (status >= 0) status = load_begin(r, slot, layer, (int)from->count, &span);
  if (status >= 0) status = kvl_tensor_index(&r->memory, slot, &into);
  if (status < 0) return status;
  status = move_on(r, stream, cache, from, &into, to, &r->moved_in);
  kvl_tensor_close(&into);
  return status < 0 ? status : load_end(r, slot, span);
}

int kvl_ring_planned(kvl_ring *r) {
  int status = expect_ring(r, "ring_planned");
  return status < 0 ? status : kvl_event_record(r->planned, r->device->current);
}

/* ---- compute --------------------------------------------------------------------------- */

int kvl_ring_wait(kvl_ring *r, int slot) {
  if (r && slot == KVL_RING_BUFFER) {
    r->buffer_span = span_begin(r, KVL_SPAN_COMPUTE, slot, -1, 0, r->device->current);
    return KVL_OK;
  }
  int status = expect_slot(r, "ring_wait", slot);
  if (status < 0) return status;
  struct slot *s = &r->slots[slot];
  kvl_stream *stream = r->device->current;
  status = kvl_stream_wait_event(stream, s->ready);
  if (status >= 0)
    s->span = span_begin(r, KVL_SPAN_COMPUTE, slot, s->layer, s->blocks, stream);
  return status;
}

int kvl_ring_done(kvl_ring *r, int slot) {
  if (r && slot == KVL_RING_BUFFER) {
    span_end(r, r->buffer_span, r->device->current);
    r->buffer_span = -1;
    return KVL_OK;
  }
  int status = expect_slot(r, "ring_done", slot);
  if (status < 0) return status;
  struct slot *s = &r->slots[slot];
  span_end(r, s->span, r->device->current);
  s->span = -1;
  return kvl_event_record(s->done, r->device->current);
}

/* ---- offload --------------------------------------------------------------------------- */

int kvl_ring_offload(kvl_ring *r, int layer, const kvl_tensor *buffer, const kvl_tensor *from,
                     const kvl_tensor *cache, const kvl_tensor *to, const int32_t *blocks) {
  static const char op[] = "ring_offload";
  int status = expect_layer(r, op, layer);
  if (status >= 0) status = expect_cache(r, op, buffer);
  if (status >= 0) status = expect_cache(r, op, cache);
  if (status >= 0 && (!to || !to->storage))
    status = kvl__fail(KVL_ERR_INVALID, "%s: to is missing", op);
  if (status < 0) return status;
  int n = (int)to->count, by_engine = blocks && r->bytes_block >= BYTES_COPY_ENGINE;
  if (by_engine) {
    if (n > buffer->shape[0])
      return kvl__fail(KVL_ERR_INVALID, "%s: %d blocks, expected at most the buffer's %lld",
                       op, n, (long long)buffer->shape[0]);
    status = expect_blocks(cache, op, blocks, n);
  }
  if (status >= 0) status = kvl_event_record(r->issued, r->device->current);
  if (status >= 0) status = kvl_stream_wait_event(r->offload, r->issued);
  if (status < 0) return status;
  int span = span_begin(r, KVL_SPAN_OFFLOAD, -1, layer, n, r->offload);
  if (by_engine) {
    used_on(buffer, r->offload);
    used_on(cache, r->offload);
    status = copy_runs(r, r->offload, cache, buffer->ptr, blocks, n, 0);
    if (status >= 0) r->bytes_out += n * r->bytes_block;
  } else {
    status = move_on(r, r->offload, buffer, from, cache, to, &r->moved_out);
  }
  if (status < 0) return status;
  span_end(r, span, r->offload);
  return kvl_event_record(r->offloaded[layer], r->offload);
}

int kvl_ring_wait_offload(kvl_ring *r, int layer) {
  int status = expect_layer(r, "ring_wait_offload", layer);
  return status < 0 ? status : kvl_stream_wait_event(r->device->current, r->offloaded[layer]);
}

int kvl_ring_bytes(kvl_ring *r, int64_t *to_device, int64_t *to_host) {
  int64_t moved[2];
  int status = expect_ring(r, "ring_bytes");
  if (status < 0) return status;
  KVL__NEED(to_device);
  KVL__NEED(to_host);
  status = ring_sync(r);
  if (status >= 0) status = kvl_tensor_read(&r->moved, moved, sizeof moved);
  if (status < 0) return status;
  *to_device = r->bytes_in + moved[0];
  *to_host = r->bytes_out + moved[1];
  return KVL_OK;
}
