/* The fast path of an asynchronous send; see fast_send.py.

   It does what message_checks.check_messages and SendBuffer.append do for a message that is not
   delayed, when a batch is open that it can join: that of its sharding key's queue, or any.
   Everything else is left to Python.

   From the look at the lock to the last store no Python code is called, the interpreter is not
   given away, and nothing is made that the garbage collector tracks. So whoever holds the lock
   has it before or after, never in between. */

#include "slots.h"
#include <time.h>

typedef struct {
    Py_ssize_t usual, bound, deadline_ms, deadline_max_ms, size, messages;
} BatchSlots;

/* Limits of messages and batches; what they mean stands where Python has them. */
typedef struct {
    Py_ssize_t max_message_size, max_batch_bytes, max_batch_messages;
    Py_ssize_t message_overhead, string_overhead;
    Py_ssize_t give_way_messages; /* a power of two */
    FieldLimits field;
} Limits;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *otherwise, *buffer, *topics, *locked, *clock_ns, *give_way, *reserved;
    PyTypeObject *message_type, *lanes_type, *lane_type, *batch_type, *future_type;
    MessageSlots message;
    BatchSlots batch;
    Py_ssize_t lanes_sticky, lanes_all, lane_open, buffer_bytes, buffer_admitted;
    Py_ssize_t future_batch, future_index;
    Limits limits;
    long long timeout_ms;
    int is_system_clock; /* clock_ns is the interpreter's own: asked without a call of it */
} FastSend;

/* ---- Making ------------------------------------------------------------------------------ */

static int
find_slots(FastSend *self)
{
    PyTypeObject *batch = self->batch_type;
    PyTypeObject *future = self->future_type, *buffer = Py_TYPE(self->buffer);
    int failed = mq_find_message_slots(self->message_type, &self->message)
        || mq_find_slot(batch, "usual", &self->batch.usual)
        || mq_find_slot(batch, "bound", &self->batch.bound)
        || mq_find_slot(batch, "deadline_ms", &self->batch.deadline_ms)
        || mq_find_slot(batch, "deadline_max_ms", &self->batch.deadline_max_ms)
        || mq_find_slot(batch, "size", &self->batch.size)
        || mq_find_slot(batch, "messages", &self->batch.messages)
        || mq_find_slot(self->lanes_type, "sticky", &self->lanes_sticky)
        || mq_find_slot(self->lanes_type, "lanes", &self->lanes_all)
        || mq_find_slot(self->lane_type, "open", &self->lane_open)
        || mq_find_slot(buffer, "_bytes", &self->buffer_bytes)
        || mq_find_slot(buffer, "_admitted_bytes", &self->buffer_admitted)
        || mq_find_slot(future, "_batch", &self->future_batch)
        || mq_find_slot(future, "index", &self->future_index);
    return failed ? -1 : 0;
}

static PyObject *fast_send_call(PyObject *, PyObject *const *, size_t, PyObject *);

static int
is_system_clock(PyObject *clock_ns)
{
    PyObject *module = PyImport_ImportModule("time");
    PyObject *own = module == NULL ? NULL : PyObject_GetAttrString(module, "monotonic_ns");
    int is_own = own == NULL ? -1 : own == clock_ns;
    Py_XDECREF(own);
    Py_XDECREF(module);
    return is_own;
}

static PyObject *
fast_send_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "otherwise", "buffer", "topics", "lock", "clock_ns", "give_way", "reserved",
        "message_type", "lanes_type", "lane_type", "batch_type", "future_type",
        "timeout_ms", "limits", "field_limits", NULL
    };
    PyObject *otherwise, *buffer, *topics, *lock, *clock_ns, *give_way, *reserved;
    PyTypeObject *message_type, *lanes_type, *lane_type, *batch_type, *future_type;
    long long timeout_ms;
    Limits limits;
    FieldLimits *field = &limits.field;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$OOO!OOOO!O!O!O!O!O!L(nnnnnn)(nnnnnnn):FastSend", names,
            &otherwise, &buffer, &PyDict_Type, &topics, &lock, &clock_ns, &give_way,
            &PyFrozenSet_Type, &reserved,
            &PyType_Type, &message_type, &PyType_Type, &lanes_type, &PyType_Type, &lane_type,
            &PyType_Type, &batch_type, &PyType_Type, &future_type, &timeout_ms,
            &limits.max_message_size, &limits.max_batch_bytes, &limits.max_batch_messages,
            &limits.message_overhead, &limits.string_overhead, &limits.give_way_messages,
            &field->tag, &field->keys, &field->key, &field->sharding_key, &field->properties,
            &field->flag, &field->deliver_at_ms))
        return NULL;
    FastSend *self = (FastSend *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = fast_send_call;
    self->otherwise = Py_NewRef(otherwise);
    self->buffer = Py_NewRef(buffer);
    self->topics = Py_NewRef(topics);
    self->clock_ns = Py_NewRef(clock_ns);
    self->give_way = Py_NewRef(give_way);
    self->reserved = Py_NewRef(reserved);
    self->message_type = (PyTypeObject *)Py_NewRef(message_type);
    self->lanes_type = (PyTypeObject *)Py_NewRef(lanes_type);
    self->lane_type = (PyTypeObject *)Py_NewRef(lane_type);
    self->batch_type = (PyTypeObject *)Py_NewRef(batch_type);
    self->future_type = (PyTypeObject *)Py_NewRef(future_type);
    self->timeout_ms = timeout_ms;
    self->limits = limits;
    self->locked = PyObject_GetAttrString(lock, "locked");
    self->is_system_clock = is_system_clock(clock_ns);
    if (self->locked == NULL || self->is_system_clock < 0 || find_slots(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (PyType_IS_GC(future_type)) {
        PyErr_Format(PyExc_TypeError, "%s is tracked by the collector", future_type->tp_name);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
fast_send_traverse(FastSend *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->otherwise);
    Py_VISIT(self->buffer);
    Py_VISIT(self->topics);
    Py_VISIT(self->locked);
    Py_VISIT(self->clock_ns);
    Py_VISIT(self->give_way);
    Py_VISIT(self->reserved);
    Py_VISIT(self->message_type);
    Py_VISIT(self->lanes_type);
    Py_VISIT(self->lane_type);
    Py_VISIT(self->batch_type);
    Py_VISIT(self->future_type);
    return 0;
}

/* Only what the cycle of a producer and its fast path goes through. */
static int
fast_send_clear(FastSend *self)
{
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->give_way);
    return 0;
}

static void
fast_send_dealloc(FastSend *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fast_send_clear(self);
    Py_CLEAR(self->buffer);
    Py_CLEAR(self->topics);
    Py_CLEAR(self->locked);
    Py_CLEAR(self->clock_ns);
    Py_CLEAR(self->reserved);
    Py_CLEAR(self->message_type);
    Py_CLEAR(self->lanes_type);
    Py_CLEAR(self->lane_type);
    Py_CLEAR(self->batch_type);
    Py_CLEAR(self->future_type);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- Checking: -1 where only Python can tell, else the bytes that texts are taken to need --- */

/* Of nothing, or of a text that takes so many bytes. */
static inline Py_ssize_t
optional_size(const FastSend *self, PyObject *text, Py_ssize_t bytes)
{
    if (text == Py_None)
        return 0;
    return bytes < 0 ? -1 : bytes + self->limits.string_overhead;
}

static Py_ssize_t
keys_size(const FastSend *self, PyObject *keys)
{
    Py_ssize_t count = key_count(keys, self->limits.field.keys), total = 0;
    if (count < 0)
        return -1;
    for (Py_ssize_t number = 0; number < count; number++) {
        Py_ssize_t bytes = text_bytes(
            PySequence_Fast_GET_ITEM(keys, number), self->limits.field.key);
        if (bytes < 0)
            return -1;
        total += bytes + self->limits.string_overhead;
    }
    return total;
}

static Py_ssize_t
properties_size(const FastSend *self, PyObject *properties)
{
    if (properties == Py_None)
        return 0;
    Py_ssize_t bytes = properties_bytes(properties, self->reserved, self->limits.field.properties);
    return bytes < 0 ? -1 : bytes + 2 * self->limits.string_overhead * PyDict_GET_SIZE(properties);
}

/* Of a message that is surely legal, but for its topic's name, and not delayed. */
static Py_ssize_t
texts_size(const FastSend *self, PyObject *message)
{
    const MessageSlots *at = &self->message;
    const FieldLimits *limits = &self->limits.field;
    if (!Py_IS_TYPE(message, self->message_type))
        return -1;
    PyObject *topic = SLOT(message, at->topic), *body = SLOT(message, at->body);
    if (topic == NULL || !PyUnicode_CheckExact(topic) || body == NULL || !PyBytes_CheckExact(body))
        return -1;
    Py_ssize_t size = PyBytes_GET_SIZE(body);
    if (size <= 0 || size > self->limits.max_message_size
            || number_of(SLOT(message, at->flag), limits->flag) < 0
            || number_of(SLOT(message, at->delay_level), 0) < 0
            || number_of(SLOT(message, at->deliver_at_ms), 0) < 0)
        return -1;
    PyObject *tag = SLOT(message, at->tag), *sharding_key = SLOT(message, at->sharding_key);
    Py_ssize_t tag_needs = optional_size(self, tag, tag_bytes(tag, limits->tag));
    Py_ssize_t sharding_key_needs = optional_size(
        self, sharding_key, text_bytes(sharding_key, limits->sharding_key));
    Py_ssize_t keys = keys_size(self, SLOT(message, at->keys));
    Py_ssize_t properties = properties_size(self, SLOT(message, at->properties));
    if (tag_needs < 0 || sharding_key_needs < 0 || keys < 0 || properties < 0)
        return -1;
    return tag_needs + sharding_key_needs + keys + properties;
}

/* ---- Sending ----------------------------------------------------------------------------- */

/* A slot's whole number; -1 also for what is none, with no error set. */
static long long
number_at(PyObject *object, Py_ssize_t place)
{
    PyObject *value = SLOT(object, place);
    if (value == NULL || !PyLong_CheckExact(value))
        return -1;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow ? -1 : number;
}

/* Takes over the reference to the value. */
static void
replace_slot(PyObject *object, Py_ssize_t place, PyObject *value)
{
    PyObject *before = SLOT(object, place);
    SLOT(object, place) = value;
    Py_XDECREF(before);
}

static PyObject *
make_future(FastSend *self, PyObject *batch, Py_ssize_t index)
{
    PyObject *place = PyLong_FromSsize_t(index);
    if (place == NULL)
        return NULL;
    PyObject *future = self->future_type->tp_alloc(self->future_type, 0);
    if (future == NULL) {
        Py_DECREF(place);
        return NULL;
    }
    SLOT(future, self->future_batch) = Py_NewRef(batch);
    SLOT(future, self->future_index) = place;
    return future;
}

/* As zlib's; texts of a few bytes are not worth a table. */
static unsigned long
crc32_of(const char *bytes, Py_ssize_t size)
{
    unsigned long crc = 0xffffffffUL;
    for (Py_ssize_t place = 0; place < size; place++) {
        crc ^= (unsigned char)bytes[place];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320UL & (0UL - (crc & 1)));
    }
    return crc ^ 0xffffffffUL;
}

/* The lane of a message's sharding key, as queue_selector.queue_index has it, or the sticky one;
   borrowed, NULL if it is none. */
static PyObject *
choose_lane(const FastSend *self, PyObject *lanes, PyObject *sharding_key)
{
    PyObject *lane;
    if (sharding_key == Py_None) {
        lane = SLOT(lanes, self->lanes_sticky);
    } else {
        PyObject *all = SLOT(lanes, self->lanes_all);
        Py_ssize_t size = 0;
        const char *bytes = utf8_of(sharding_key, &size);
        if (bytes == NULL || all == NULL || !PyTuple_CheckExact(all) || PyTuple_GET_SIZE(all) == 0)
            return NULL;
        unsigned long count = (unsigned long)PyTuple_GET_SIZE(all);
        lane = PyTuple_GET_ITEM(all, (Py_ssize_t)(crc32_of(bytes, size) % count));
    }
    return lane != NULL && Py_IS_TYPE(lane, self->lane_type) ? lane : NULL;
}

/* A message joins the open batch of its lane: its future, and how many bytes it is time to give
   way for, or 0. None when it cannot join; nothing was changed then. */
static PyObject *
join(FastSend *self, PyObject *lanes, PyObject *message, Py_ssize_t texts, long long deadline_ms,
     long long *to_give_way)
{
    const BatchSlots *at = &self->batch;
    const Limits *limits = &self->limits;
    PyObject *sharding_key = SLOT(message, self->message.sharding_key);
    PyObject *lane = choose_lane(self, lanes, sharding_key);
    if (lane == NULL)
        Py_RETURN_NONE;
    /* What may go anywhere stays apart from what may not. */
    PyObject *bound = sharding_key == Py_None ? Py_False : Py_True;
    PyObject *batch = SLOT(lane, self->lane_open);
    if (batch == NULL || !Py_IS_TYPE(batch, self->batch_type) || SLOT(batch, at->usual) != Py_True
            || SLOT(batch, at->bound) != bound)
        Py_RETURN_NONE;
    PyObject *messages = SLOT(batch, at->messages);
    if (messages == NULL || !PyList_CheckExact(messages))
        Py_RETURN_NONE;

    Py_ssize_t index = PyList_GET_SIZE(messages);
    PyObject *body = SLOT(message, self->message.body);
    long long size = PyBytes_GET_SIZE(body) + limits->message_overhead + texts;
    long long batch_size = number_at(batch, at->size);
    long long before_ms = number_at(batch, at->deadline_ms);
    long long bytes = number_at(self->buffer, self->buffer_bytes);
    if (batch_size < 0 || bytes < 0 || before_ms < 0
            || before_ms > deadline_ms || deadline_ms > number_at(batch, at->deadline_max_ms)
            || batch_size + size >= limits->max_batch_bytes
            || index + 1 >= limits->max_batch_messages
            || bytes >= number_at(self->buffer, self->buffer_admitted))
        Py_RETURN_NONE;

    /* All that can fail comes first. */
    PyObject *new_size = PyLong_FromLongLong(batch_size + size);
    PyObject *new_bytes = PyLong_FromLongLong(bytes + size);
    PyObject *new_deadline = before_ms == deadline_ms
        ? Py_NewRef(SLOT(batch, at->deadline_ms)) : PyLong_FromLongLong(deadline_ms);
    PyObject *future = make_future(self, batch, index);
    if (new_size == NULL || new_bytes == NULL || new_deadline == NULL || future == NULL
            || PyList_Append(messages, message) < 0) {
        Py_XDECREF(future);
        Py_XDECREF(new_size);
        Py_XDECREF(new_bytes);
        Py_XDECREF(new_deadline);
        return NULL;
    }
    replace_slot(batch, at->size, new_size);
    replace_slot(batch, at->deadline_ms, new_deadline);
    replace_slot(self->buffer, self->buffer_bytes, new_bytes);
    int is_time = ((index + 1) & (limits->give_way_messages - 1)) == 0;
    *to_give_way = is_time ? size * limits->give_way_messages : 0;
    return future;
}

/* The monotonic clock; -1 with an error set. */
static long long
read_clock_ms(FastSend *self)
{
    struct timespec time;
    if (self->is_system_clock && clock_gettime(CLOCK_MONOTONIC, &time) == 0)
        return (long long)time.tv_sec * 1000 + time.tv_nsec / 1000000;
    PyObject *now = PyObject_CallNoArgs(self->clock_ns);
    if (now == NULL)
        return -1;
    long long now_ns = PyLong_AsLongLong(now);
    Py_DECREF(now);
    if (now_ns < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the clock shows a negative time");
        return -1;
    }
    return now_ns / 1000000;
}

static PyObject *
fast_send_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    FastSend *self = (FastSend *)object;
    if (self->otherwise == NULL || self->give_way == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the producer is gone");
        return NULL;
    }
    if (PyVectorcall_NARGS(flags) != 1 || names != NULL)
        return PyObject_Vectorcall(self->otherwise, args, flags, names);
    PyObject *message = args[0];

    /* The clock may be anything, so it is asked before all that must not be interrupted. */
    long long now_ms = read_clock_ms(self);
    if (now_ms < 0)
        return NULL;
    PyObject *locked = PyObject_CallNoArgs(self->locked);
    if (locked == NULL)
        return NULL;
    int is_free = locked == Py_False;
    Py_DECREF(locked);

    PyObject *future = NULL, *lanes;
    long long to_give_way = 0;
    Py_ssize_t texts = is_free ? texts_size(self, message) : -1;
    if (texts < 0)
        return PyObject_CallOneArg(self->otherwise, message);
    lanes = PyDict_GetItemWithError(self->topics, SLOT(message, self->message.topic));
    if (lanes == NULL && PyErr_Occurred())
        return NULL;
    if (lanes == NULL || !Py_IS_TYPE(lanes, self->lanes_type))
        return PyObject_CallOneArg(self->otherwise, message);
    future = join(self, lanes, message, texts, now_ms + self->timeout_ms, &to_give_way);
    if (future == Py_None) {
        Py_DECREF(future);
        return PyObject_CallOneArg(self->otherwise, message);
    }
    if (future != NULL && to_give_way) {
        PyObject *size = PyLong_FromLongLong(to_give_way);
        PyObject *result = size == NULL ? NULL : PyObject_CallOneArg(self->give_way, size);
        Py_XDECREF(size);
        if (result == NULL)
            Py_CLEAR(future);
        Py_XDECREF(result);
    }
    return future;
}

/* ---- The object -------------------------------------------------------------------------- */

static PyMemberDef fast_send_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastSend, vectorcall), READONLY, NULL},
    /* By which inspect.signature and help find the method that is documented. */
    {"__wrapped__", T_OBJECT, offsetof(FastSend, otherwise), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot fast_send_slots[] = {
    {Py_tp_doc, "Producer.send_async by the fast path; see mqmesh.sdk.producer.fast_send."},
    {Py_tp_new, fast_send_new},
    {Py_tp_dealloc, fast_send_dealloc},
    {Py_tp_traverse, fast_send_traverse},
    {Py_tp_clear, fast_send_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, fast_send_members},
    {0, NULL},
};

PyType_Spec mq_fast_send_spec = {
    .name = "mqmesh._native.FastSend",
    .basicsize = sizeof(FastSend),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = fast_send_slots,
};
