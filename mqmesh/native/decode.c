/* Decodes the messages of a batch at once; see native_decode.py.

   What it reads comes from anywhere. It takes only what it is sure to read as the careful way
   would; at the first byte that is otherwise it gives up, and that way reads all of it, and tells
   what is wrong.

   Keys and properties are checked, but made only when they are looked at: a message has them
   encoded until then, side by side in the slot of properties, and nothing in the slot of keys. */

#include "decode.h"

/* What the next message may share with the one before. */
typedef struct {
    Reading reading;
    PyObject *topic, *tag; /* of the messages: borrowed, and owned or NULL */
    const char *topic_bytes; /* as it is stored */
    Py_ssize_t topic_size, strings;
} Batch;

/* ---- Fields: NULL with an error set, or without one where the careful way must read ---------- */

static inline PyObject *
make_optional(Reading *reading, Py_ssize_t max_characters)
{
    if (read_this(reading, 0xc0) == 0)
        return Py_NewRef(Py_None);
    return make_limited(reading, max_characters);
}

static inline PyObject *
make_body(Reading *reading)
{
    Py_ssize_t length = 0;
    const unsigned char *body = read_body(reading, &length);
    return body == NULL ? NULL : PyBytes_FromStringAndSize((const char *)body, length);
}

/* Messages side by side often have the same tag: one object does for all. */
static inline PyObject *
make_tag(const Decoder *self, Batch *batch)
{
    Reading start = batch->reading;
    if (batch->tag != NULL && PyUnicode_IS_COMPACT_ASCII(batch->tag)) {
        Py_ssize_t length = 0;
        const unsigned char *text = read_text(&batch->reading, &length);
        if (text != NULL && length == PyUnicode_GET_LENGTH(batch->tag)
                && memcmp(text, PyUnicode_1BYTE_DATA(batch->tag), (size_t)length) == 0)
            return Py_NewRef(batch->tag);
        batch->reading = start;
    }
    PyObject *tag = make_optional(&batch->reading, self->limits.tag);
    if (tag != NULL && tag != Py_None)
        Py_XSETREF(batch->tag, Py_NewRef(tag));
    return tag;
}

static inline PyObject *
make_number(const Decoder *self, Reading *reading, long long limit)
{
    if (read_this(reading, 0) == 0)
        return Py_NewRef(self->zero);
    long long number = read_number(reading, limit);
    return number < 0 ? NULL : PyLong_FromLongLong(number);
}

/* Keys and properties, made when they are looked at; -1 where the careful way must read. */
static inline int
keep_encoded(const Decoder *self, Batch *batch, PyObject *message)
{
    Reading *reading = &batch->reading;
    const unsigned char *start = reading->at;
    Py_ssize_t bytes;
    Py_ssize_t keys = skip_keys(reading, &self->limits);
    int has_none = reading->at != reading->end && *reading->at == 0xc0;
    Py_ssize_t properties = keys < 0 ? -1 : skip_properties(reading, &self->limits, 0, &bytes);
    if (properties < 0)
        return -1;
    batch->strings += keys + 2 * properties;
    if (batch->strings > self->max_strings)
        return -1;
    if (keys == 0 && has_none) {
        SLOT(message, self->message.keys) = Py_NewRef(self->no_keys);
        SLOT(message, self->message.properties) = Py_NewRef(Py_None);
        return 0;
    }
    PyObject *encoded = PyBytes_FromStringAndSize((const char *)start, reading->at - start);
    SLOT(message, self->message.properties) = encoded;
    return encoded == NULL ? -1 : 0;
}

/* ---- Messages ---------------------------------------------------------------------------- */

static inline int
read_topic(Batch *batch)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(&batch->reading, &length);
    return text != NULL && length == batch->topic_size
        && memcmp(text, batch->topic_bytes, (size_t)length) == 0 ? 0 : -1;
}

static inline PyObject *
make_message(const Decoder *self, Batch *batch, long long queue_offset, PyObject *info)
{
    const MessageSlots *at = &self->message;
    const FieldLimits *limits = &self->limits;
    Reading *reading = &batch->reading;
    if (read_this(reading, 0x99) < 0 || read_topic(batch) < 0)
        return NULL;
    PyObject *message = self->message_type->tp_alloc(self->message_type, 0);
    if (message == NULL)
        return NULL;
    /* One that is not whole yet is freed like any other: its slots hold something, or nothing. */
    if ((SLOT(message, at->body) = make_body(reading)) == NULL
            || (SLOT(message, at->tag) = make_tag(self, batch)) == NULL
            || keep_encoded(self, batch, message) < 0
            || (SLOT(message, at->flag) = make_number(self, reading, limits->flag)) == NULL
            || (SLOT(message, at->sharding_key)
                = make_optional(reading, limits->sharding_key)) == NULL
            || (SLOT(message, at->delay_level) = make_number(self, reading, limits->flag)) == NULL
            || (SLOT(message, at->deliver_at_ms)
                = make_number(self, reading, limits->deliver_at_ms)) == NULL
            || (SLOT(message, self->queue_offset) = PyLong_FromLongLong(queue_offset)) == NULL) {
        Py_DECREF(message);
        return NULL;
    }
    SLOT(message, at->topic) = Py_NewRef(batch->topic);
    SLOT(message, self->batch) = Py_NewRef(info);
    return message;
}

static PyObject *
make_messages(const Decoder *self, Batch *batch, Py_ssize_t count, long long first_offset,
              PyObject *info)
{
    Reading *reading = &batch->reading;
    /* A message takes 12 bytes at least: no list is made for messages that cannot be there. */
    if (read_array(reading) != count || count > (reading->end - reading->at) / 12)
        return NULL;
    PyObject *messages = PyList_New(count);
    /* Whoever the collector calls must not find a list with holes. */
    if (messages != NULL)
        PyObject_GC_UnTrack(messages);
    for (Py_ssize_t number = 0; messages != NULL && number < count; number++) {
        PyObject *message = make_message(self, batch, first_offset + number, info);
        if (message == NULL)
            Py_CLEAR(messages);
        else
            PyList_SET_ITEM(messages, number, message);
    }
    if (messages != NULL && reading->at != reading->end)
        Py_CLEAR(messages);
    if (messages != NULL)
        PyObject_GC_Track(messages);
    return messages;
}

PyDoc_STRVAR(decode_doc,
"decode(payload, count, topic, first_offset, batch, shown)\n--\n\n"
"The messages of a payload with their places; None if they are not for it. All are stored under a\n"
"topic, and have another one.");

static PyObject *
decoder_decode(Decoder *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 6 || !PyUnicode_Check(args[2]) || !PyUnicode_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError,
                        "decode takes a payload, a count, a topic, an offset, a batch and a topic");
        return NULL;
    }
    Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    long long first_offset = PyLong_AsLongLong(args[3]);
    if (first_offset == -1 && PyErr_Occurred())
        return NULL;
    Batch batch = {.topic = args[5]};
    batch.topic_bytes = utf8_of(args[2], &batch.topic_size);
    if (batch.topic_bytes == NULL || !PyUnicode_IS_COMPACT_ASCII(args[2])
            || count < 1 || first_offset < 0 || first_offset > LLONG_MAX - count)
        Py_RETURN_NONE;
    Py_buffer payload;
    if (PyObject_GetBuffer(args[0], &payload, PyBUF_SIMPLE) < 0)
        return NULL;
    batch.reading.at = payload.buf;
    batch.reading.end = batch.reading.at + payload.len;
    PyObject *messages = make_messages(self, &batch, count, first_offset, args[4]);
    Py_XDECREF(batch.tag);
    PyBuffer_Release(&payload);
    if (messages == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return messages;
}

/* ---- The object -------------------------------------------------------------------------- */

static PyObject *
decoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "message_type", "batch_type", "no_keys", "max_strings", "field_limits", NULL
    };
    PyTypeObject *message_type, *batch_type;
    PyObject *no_keys;
    Py_ssize_t max_strings;
    FieldLimits limits;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O!O!O!n(nnnnnnn):Decoder", names, &PyType_Type, &message_type,
            &PyType_Type, &batch_type, &PyTuple_Type, &no_keys, &max_strings, &limits.tag,
            &limits.keys, &limits.key, &limits.sharding_key, &limits.properties, &limits.flag,
            &limits.deliver_at_ms))
        return NULL;
    if (PyType_IS_GC(message_type)) {
        PyErr_Format(PyExc_TypeError, "%s is tracked by the collector", message_type->tp_name);
        return NULL;
    }
    Decoder *self = (Decoder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->message_type = (PyTypeObject *)Py_NewRef(message_type);
    self->batch_type = (PyTypeObject *)Py_NewRef(batch_type);
    self->no_keys = Py_NewRef(no_keys);
    self->max_strings = max_strings;
    self->limits = limits;
    self->zero = PyLong_FromLong(0);
    PyTypeObject *plain = message_type->tp_base; /* whose slots no field stands in front of */
    if (self->zero == NULL || mq_find_message_slots(plain, &self->message) < 0
            || mq_find_slot(message_type, "queue_offset", &self->queue_offset) < 0
            || mq_find_slot(message_type, "batch", &self->batch) < 0
            || mq_find_slot(batch_type, "producer_id", &self->info.producer_id) < 0
            || mq_find_slot(batch_type, "first_sequence", &self->info.first_sequence) < 0
            || mq_find_slot(batch_type, "base_queue_offset", &self->info.base_queue_offset) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
decoder_dealloc(Decoder *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->message_type);
    Py_XDECREF(self->batch_type);
    Py_XDECREF(self->no_keys);
    Py_XDECREF(self->zero);
    for (int place = 0; place < SHARED_NAMES; place++)
        Py_XDECREF(self->names[place]);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef decoder_methods[] = {
    {"decode", (PyCFunction)decoder_decode, METH_FASTCALL, decode_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_doc, "Decodes messages; see mqmesh.batch.native_decode."},
    {Py_tp_new, decoder_new},
    {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_methods, decoder_methods},
    {0, NULL},
};

PyType_Spec mq_decoder_spec = {
    .name = "mqmesh._native.Decoder",
    .basicsize = sizeof(Decoder),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = decoder_slots,
};
