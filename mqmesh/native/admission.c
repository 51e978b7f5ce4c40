/* Messages join open batches; the twin in Python, and what it is all for: admission.py.

   OpenBatch is the open batch of a lane. Admission is what all open batches of a producer share:
   the lock, the room, the limits. Its join does what message_checks.check_messages and
   SendBuffer.append do for a message that is not delayed, when a batch is open that it can join.
   Everything else is left to Python.

   A join does not take the lock: it looks whether somebody has it. That is enough because from the
   look to the end of the join the interpreter is given to nobody else. Nothing in there runs code
   of Python, nor allocates what the garbage collector tracks, so no finalizer runs either: members
   with slots are read, an int and a future that is not tracked are made, and a list grows. Who has
   waited for the lock gets it only with the interpreter. */

#include "slots.h"
#include <time.h>

/* ---- The open batch ---------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *pending, *messages;
    long long size, deadline_ms, deadline_max_ms;
    char usual, bound;
} OpenBatch;

static PyObject *
open_batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pending", "messages", "deadline_ms", "deadline_max_ms", "usual", NULL};
    PyObject *pending, *messages;
    long long deadline_ms, deadline_max_ms;
    int usual;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!LLp:OpenBatch", names, &pending,
                                     &PyList_Type, &messages, &deadline_ms, &deadline_max_ms,
                                     &usual))
        return NULL;
    OpenBatch *self = (OpenBatch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->pending = Py_NewRef(pending);
    self->messages = Py_NewRef(messages);
    self->deadline_ms = deadline_ms;
    self->deadline_max_ms = deadline_max_ms;
    self->usual = (char)usual;
    return (PyObject *)self;
}

static int
open_batch_traverse(OpenBatch *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->pending);
    Py_VISIT(self->messages);
    return 0;
}

static int
open_batch_clear(OpenBatch *self)
{
    Py_CLEAR(self->pending);
    Py_CLEAR(self->messages);
    return 0;
}

static void
open_batch_dealloc(OpenBatch *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    open_batch_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef open_batch_members[] = {
    {"pending", T_OBJECT_EX, offsetof(OpenBatch, pending), READONLY, NULL},
    {"messages", T_OBJECT_EX, offsetof(OpenBatch, messages), READONLY, NULL},
    {"size", T_LONGLONG, offsetof(OpenBatch, size), 0, NULL},
    {"deadline_ms", T_LONGLONG, offsetof(OpenBatch, deadline_ms), 0, NULL},
    {"deadline_max_ms", T_LONGLONG, offsetof(OpenBatch, deadline_max_ms), READONLY, NULL},
    {"usual", T_BOOL, offsetof(OpenBatch, usual), READONLY, NULL},
    {"bound", T_BOOL, offsetof(OpenBatch, bound), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot open_batch_slots[] = {
    {Py_tp_doc, "The open batch of a lane; see mqmesh.sdk.producer.admission."},
    {Py_tp_new, open_batch_new},
    {Py_tp_dealloc, open_batch_dealloc},
    {Py_tp_traverse, open_batch_traverse},
    {Py_tp_clear, open_batch_clear},
    {Py_tp_members, open_batch_members},
    {0, NULL},
};

PyType_Spec mq_open_batch_spec = {
    .name = "mqmesh._native.OpenBatch",
    .basicsize = sizeof(OpenBatch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = open_batch_slots,
};

/* ---- Admission --------------------------------------------------------------------------- */

/* Limits of messages and batches; what they mean stands where Python has them. */
typedef struct {
    Py_ssize_t max_message_size, max_batch_bytes, max_batch_messages;
    Py_ssize_t message_overhead, string_overhead;
    Py_ssize_t give_way_messages;
    FieldLimits field;
} Limits;

typedef struct {
    PyObject_HEAD
    PyObject *topics, *locked, *clock_ns, *give_way, *reserved;
    PyObject *sticky, *lanes, *open; /* names of attributes */
    PyTypeObject *make_future, *message_type, *batch_type;
    MessageSlots message;
    Limits limits;
    long long timeout_ms, bytes, admitted_bytes;
    int is_system_clock; /* clock_ns is the interpreter's own: asked without a call of it */
} Admission;

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

/* True of what is known to do without code of Python: a lock that is the interpreter's own, and a
   class of futures that are not tracked and are made by nothing but their two fields. */
static int
is_calm(PyObject *lock, PyTypeObject *future_type)
{
    PyObject *module = PyImport_ImportModule("_thread");
    PyObject *own = module == NULL ? NULL : PyObject_GetAttrString(module, "LockType");
    int is_own = own != NULL && (PyObject *)Py_TYPE(lock) == own;
    Py_XDECREF(own);
    Py_XDECREF(module);
    if (PyErr_Occurred())
        return 0;
    if (!is_own)
        PyErr_SetString(PyExc_TypeError, "lock must be a threading.Lock");
    else if (PyType_IS_GC(future_type))
        PyErr_SetString(PyExc_TypeError, "make_future must be a class whose objects are not tracked");
    return !PyErr_Occurred();
}

static PyObject *
admission_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "topics", "lock", "clock_ns", "give_way", "make_future", "reserved", "message_type", "batch_type",
        "timeout_ms", "max_bytes", "limits", "field_limits", NULL
    };
    PyObject *topics, *lock, *clock_ns, *give_way, *reserved;
    PyTypeObject *make_future, *message_type, *batch_type;
    long long timeout_ms, max_bytes;
    Limits limits;
    FieldLimits *field = &limits.field;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O!OOOO!O!O!O!LL(nnnnnn)(nnnnnnn):Admission", names,
            &PyDict_Type, &topics, &lock, &clock_ns, &give_way, &PyType_Type, &make_future,
            &PyFrozenSet_Type, &reserved,
            &PyType_Type, &message_type, &PyType_Type, &batch_type, &timeout_ms, &max_bytes,
            &limits.max_message_size, &limits.max_batch_bytes, &limits.max_batch_messages,
            &limits.message_overhead, &limits.string_overhead, &limits.give_way_messages,
            &field->tag, &field->keys, &field->key, &field->sharding_key, &field->properties,
            &field->flag, &field->deliver_at_ms))
        return NULL;
    if (!is_calm(lock, make_future))
        return NULL;
    Admission *self = (Admission *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->topics = Py_NewRef(topics);
    self->clock_ns = Py_NewRef(clock_ns);
    self->give_way = Py_NewRef(give_way);
    self->make_future = (PyTypeObject *)Py_NewRef(make_future);
    self->reserved = Py_NewRef(reserved);
    self->message_type = (PyTypeObject *)Py_NewRef(message_type);
    self->batch_type = (PyTypeObject *)Py_NewRef(batch_type);
    self->timeout_ms = timeout_ms;
    self->admitted_bytes = max_bytes;
    self->limits = limits;
    self->locked = PyObject_GetAttrString(lock, "locked");
    self->sticky = PyUnicode_InternFromString("sticky");
    self->lanes = PyUnicode_InternFromString("lanes");
    self->open = PyUnicode_InternFromString("open");
    self->is_system_clock = is_system_clock(clock_ns);
    if (self->locked == NULL || self->sticky == NULL
            || self->lanes == NULL || self->open == NULL || self->is_system_clock < 0
            || mq_find_message_slots(self->message_type, &self->message)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
admission_traverse(Admission *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->topics);
    Py_VISIT(self->locked);
    Py_VISIT(self->clock_ns);
    Py_VISIT(self->give_way);
    Py_VISIT(self->make_future);
    Py_VISIT(self->reserved);
    Py_VISIT(self->message_type);
    Py_VISIT(self->batch_type);
    return 0;
}

/* Only what a cycle goes through: topics hold lanes, which hold batches. */
static int
admission_clear(Admission *self)
{
    Py_CLEAR(self->topics);
    return 0;
}

static void
admission_dealloc(Admission *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    admission_clear(self);
    Py_CLEAR(self->locked);
    Py_CLEAR(self->clock_ns);
    Py_CLEAR(self->give_way);
    Py_CLEAR(self->make_future);
    Py_CLEAR(self->reserved);
    Py_CLEAR(self->sticky);
    Py_CLEAR(self->lanes);
    Py_CLEAR(self->open);
    Py_CLEAR(self->message_type);
    Py_CLEAR(self->batch_type);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- Checking: -1 where only Python can tell, else the bytes that texts are taken to need --- */

/* Of nothing, or of a text that takes so many bytes. */
static inline Py_ssize_t
optional_size(const Admission *self, PyObject *text, Py_ssize_t bytes)
{
    if (text == Py_None)
        return 0;
    return bytes < 0 ? -1 : bytes + self->limits.string_overhead;
}

static Py_ssize_t
keys_size(const Admission *self, PyObject *keys)
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
properties_size(const Admission *self, PyObject *properties)
{
    if (properties == Py_None)
        return 0;
    Py_ssize_t bytes = properties_bytes(properties, self->reserved, self->limits.field.properties);
    return bytes < 0 ? -1 : bytes + 2 * self->limits.string_overhead * PyDict_GET_SIZE(properties);
}

/* Of a message that is surely legal, but for its topic's name, and not delayed. */
static Py_ssize_t
texts_size(const Admission *self, PyObject *message)
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
    /* One after the other: what fails may have run a finalizer, and then nothing is looked at. */
    PyObject *tag = SLOT(message, at->tag);
    Py_ssize_t tag_needs = optional_size(self, tag, tag_bytes(tag, limits->tag));
    if (tag_needs < 0)
        return -1;
    PyObject *sharding_key = SLOT(message, at->sharding_key);
    Py_ssize_t sharding_key_needs = optional_size(
        self, sharding_key, text_bytes(sharding_key, limits->sharding_key));
    if (sharding_key_needs < 0)
        return -1;
    Py_ssize_t keys = keys_size(self, SLOT(message, at->keys));
    if (keys < 0)
        return -1;
    Py_ssize_t properties = properties_size(self, SLOT(message, at->properties));
    return properties < 0 ? -1 : tag_needs + sharding_key_needs + keys + properties;
}

/* ---- Joining ----------------------------------------------------------------------------- */

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

/* The open batch of the lane of a message's sharding key, as queue_selector.queue_index has it, or
   of the sticky lane; None if there is none. */
static PyObject *
find_open(const Admission *self, PyObject *topic, PyObject *sharding_key)
{
    PyObject *lane = NULL, *open;
    if (sharding_key == Py_None) {
        lane = PyObject_GetAttr(topic, self->sticky);
    } else {
        PyObject *all = PyObject_GetAttr(topic, self->lanes);
        Py_ssize_t size = 0;
        const char *bytes = utf8_of(sharding_key, &size);
        if (all != NULL && bytes != NULL && PyTuple_CheckExact(all) && PyTuple_GET_SIZE(all) > 0) {
            unsigned long count = (unsigned long)PyTuple_GET_SIZE(all);
            lane = Py_NewRef(PyTuple_GET_ITEM(all, (Py_ssize_t)(crc32_of(bytes, size) % count)));
        }
        Py_XDECREF(all);
        if (lane == NULL && !PyErr_Occurred())
            Py_RETURN_NONE;
    }
    if (lane == NULL)
        return NULL;
    open = PyObject_GetAttr(lane, self->open);
    Py_DECREF(lane);
    return open;
}

/* A message joins the batch: its future, or None when it cannot; nothing was changed then. */
static PyObject *
join_batch(Admission *self, OpenBatch *batch, PyObject *message, long long size,
           long long deadline_ms, long long *to_give_way)
{
    const Limits *limits = &self->limits;
    char bound = SLOT(message, self->message.sharding_key) != Py_None;
    Py_ssize_t index = PyList_GET_SIZE(batch->messages);
    /* What may go anywhere stays apart from what may not. */
    if (!batch->usual || batch->bound != bound || deadline_ms < batch->deadline_ms
            || deadline_ms > batch->deadline_max_ms
            || batch->size + size >= limits->max_batch_bytes
            || index + 1 >= limits->max_batch_messages || self->bytes >= self->admitted_bytes)
        Py_RETURN_NONE;
    PyObject *place = PyLong_FromSsize_t(index);
    if (place == NULL)
        return NULL;
    PyObject *args[] = {batch->pending, place};
    PyObject *future = PyObject_Vectorcall((PyObject *)self->make_future, args, 2, NULL);
    Py_DECREF(place);
    if (future == NULL || PyList_Append(batch->messages, message) < 0) {
        Py_XDECREF(future);
        return NULL;
    }
    batch->size += size;
    batch->deadline_ms = deadline_ms;
    self->bytes += size;
    if ((index + 1) % limits->give_way_messages == 0)
        *to_give_way = size * limits->give_way_messages;
    return future;
}

/* The monotonic clock; -1 with an error set. */
static long long
read_clock_ms(Admission *self)
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
join_topic(Admission *self, PyObject *topic, PyObject *message, Py_ssize_t texts,
           long long deadline_ms, long long *to_give_way)
{
    PyObject *open = find_open(self, topic, SLOT(message, self->message.sharding_key));
    if (open == NULL || !Py_IS_TYPE(open, self->batch_type)) {
        if (open == NULL)
            return NULL;
        Py_DECREF(open);
        Py_RETURN_NONE;
    }
    PyObject *body = SLOT(message, self->message.body);
    long long size = PyBytes_GET_SIZE(body) + self->limits.message_overhead + texts;
    PyObject *future = join_batch(self, (OpenBatch *)open, message, size, deadline_ms,
                                  to_give_way);
    Py_DECREF(open);
    return future;
}

PyDoc_STRVAR(join_doc,
"join(message)\n--\n\n"
"A message joins the open batch of its lane: its future, or None if it is to be added otherwise.");

static PyObject *
admission_join(Admission *self, PyObject *message)
{
    if (self->topics == NULL)
        Py_RETURN_NONE;
    long long now_ms = read_clock_ms(self); /* first, since it may be in Python */
    if (now_ms < 0)
        return NULL;
    Py_ssize_t texts = texts_size(self, message);
    if (texts < 0)
        Py_RETURN_NONE;
    PyObject *locked = PyObject_CallNoArgs(self->locked);
    if (locked != Py_False) /* whoever has it may have it for long: Python waits for it */
        return locked == NULL ? NULL : (Py_DECREF(locked), Py_NewRef(Py_None));
    Py_DECREF(locked);
    PyObject *topic = PyDict_GetItemWithError(self->topics, SLOT(message, self->message.topic));
    if (topic == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    Py_INCREF(topic);
    long long to_give_way = 0;
    PyObject *future = join_topic(self, topic, message, texts, now_ms + self->timeout_ms,
                                  &to_give_way);
    Py_DECREF(topic);
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

static PyMethodDef admission_methods[] = {
    {"join", (PyCFunction)admission_join, METH_O, join_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef admission_members[] = {
    {"batch_type", T_OBJECT_EX, offsetof(Admission, batch_type), READONLY, NULL},
    {"bytes", T_LONGLONG, offsetof(Admission, bytes), 0, NULL},
    {"admitted_bytes", T_LONGLONG, offsetof(Admission, admitted_bytes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot admission_slots[] = {
    {Py_tp_doc, "What all open batches of a producer share; see mqmesh.sdk.producer.admission."},
    {Py_tp_new, admission_new},
    {Py_tp_dealloc, admission_dealloc},
    {Py_tp_traverse, admission_traverse},
    {Py_tp_clear, admission_clear},
    {Py_tp_methods, admission_methods},
    {Py_tp_members, admission_members},
    {0, NULL},
};

PyType_Spec mq_admission_spec = {
    .name = "mqmesh._native.Admission",
    .basicsize = sizeof(Admission),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = admission_slots,
};
