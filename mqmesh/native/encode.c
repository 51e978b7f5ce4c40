/* Checks and encodes the messages of a batch at once; see native_encode.py.

   It does what message_checks.check_messages and payload.encode_payload do for messages that are
   surely legal. All others are left to Python, which says what is wrong with them.

   The messages are looked at twice, for what they need and to be written. In between no Python code
   is called and the interpreter is not given away, so they are the same both times, whatever other
   threads do with them. */

#include "slots.h"

/* What a batch holds at most; what it means stands where Python has it. */
typedef struct {
    Py_ssize_t messages, raw_bytes, strings, topic;
    FieldLimits field;
} Limits;

typedef struct {
    PyObject_HEAD
    PyTypeObject *message_type;
    PyObject *hashes; /* of tags that were met before: a dict of text to 8 bytes */
    PyObject *reserved; /* names of properties that users do not set */
    MessageSlots message;
    Limits limits;
} Encoder;

/* What all messages of a batch have in common, and what was found among them. */
typedef struct {
    PyObject *topic, *sharding_key, *tag; /* of the first message, borrowed */
    const char *prefix; /* written in front of each topic, which is not in it */
    Py_ssize_t prefix_size;
    PyObject *reserved; /* names of properties that it must not have, borrowed or NULL */
    long long delay_level;
    Py_ssize_t max_body_bytes, strings;
    int is_one, is_timed, has_keys, has_tags, differ_tags;
} Batch;

/* ---- msgpack: what something takes, and how it is written -------------------------------- */

static inline Py_ssize_t
text_size(Py_ssize_t length)
{
    return length + (length < 32 ? 1 : length < 256 ? 2 : 3);
}

static inline Py_ssize_t
bytes_size(Py_ssize_t length)
{
    return length + (length < 256 ? 2 : length < 65536 ? 3 : 5);
}

static inline Py_ssize_t
number_size(long long number)
{
    return number < 128 ? 1 : number < 256 ? 2 : number < 65536 ? 3 : number >> 32 ? 9 : 5;
}

/* Of an array or a map. */
static inline Py_ssize_t
count_size(Py_ssize_t count)
{
    return count < 16 ? 1 : count < 65536 ? 3 : 5;
}

/* A code and a number of so many bytes, big endian. */
static inline unsigned char *
put_header(unsigned char *at, unsigned char code, unsigned long long number, int width)
{
    *at++ = code;
    for (int byte = width - 1; byte >= 0; byte--)
        *at++ = (unsigned char)(number >> (8 * byte));
    return at;
}

static inline unsigned char *
put_text_header(unsigned char *at, size_t size)
{
    if (size < 32) {
        *at = (unsigned char)(0xa0 | size);
        return at + 1;
    }
    return size < 256 ? put_header(at, 0xd9, size, 1) : put_header(at, 0xda, size, 2);
}

static inline unsigned char *
put_text(unsigned char *at, PyObject *text)
{
    Py_ssize_t size = 0;
    const char *bytes = utf8_of(text, &size);
    at = put_text_header(at, (size_t)size);
    memcpy(at, bytes, (size_t)size);
    return at + size;
}

static inline unsigned char *
put_optional(unsigned char *at, PyObject *text)
{
    if (text != Py_None)
        return put_text(at, text);
    *at = 0xc0;
    return at + 1;
}

static inline unsigned char *
put_bytes(unsigned char *at, PyObject *bytes)
{
    size_t length = (size_t)PyBytes_GET_SIZE(bytes);
    if (length < 256)
        at = put_header(at, 0xc4, length, 1);
    else if (length < 65536)
        at = put_header(at, 0xc5, length, 2);
    else
        at = put_header(at, 0xc6, length, 4);
    memcpy(at, PyBytes_AS_STRING(bytes), length);
    return at + length;
}

/* The header of an array (short form 0x90, long ones from 0xdc on) or of a map (0x80, 0xde). */
static inline unsigned char *
put_count(unsigned char *at, size_t count, unsigned char code, unsigned char long_code)
{
    if (count < 16) {
        *at = (unsigned char)(code | count);
        return at + 1;
    }
    return count < 65536 ? put_header(at, long_code, count, 2)
        : put_header(at, (unsigned char)(long_code + 1), count, 4);
}

static inline unsigned char *
put_number(unsigned char *at, PyObject *object)
{
    unsigned long long number = (unsigned long long)PyLong_AsLongLong(object);
    if (number < 128) {
        *at = (unsigned char)number;
        return at + 1;
    }
    if (number < 256)
        return put_header(at, 0xcc, number, 1);
    if (number < 65536)
        return put_header(at, 0xcd, number, 2);
    return number >> 32 ? put_header(at, 0xcf, number, 8) : put_header(at, 0xce, number, 4);
}

/* ---- Looking: what parts of a message need, -1 where only Python can tell ---------------- */

static inline Py_ssize_t
keys_size(const FieldLimits *limits, PyObject *keys, Batch *batch)
{
    Py_ssize_t count = key_count(keys, limits->keys);
    if (count < 0)
        return -1;
    Py_ssize_t size = count_size(count);
    for (Py_ssize_t number = 0; number < count; number++) {
        Py_ssize_t bytes = text_bytes(PySequence_Fast_GET_ITEM(keys, number), limits->key);
        if (bytes < 0)
            return -1;
        size += text_size(bytes);
    }
    batch->strings += count;
    batch->has_keys |= count > 0;
    return size;
}

static inline Py_ssize_t
properties_size(const FieldLimits *limits, PyObject *properties, Batch *batch)
{
    if (properties == Py_None)
        return 1;
    if (properties_bytes(properties, batch->reserved, limits->properties) < 0)
        return -1;
    Py_ssize_t place = 0, bytes, size = count_size(PyDict_GET_SIZE(properties));
    PyObject *name, *value;
    while (PyDict_Next(properties, &place, &name, &value)) {
        utf8_of(name, &bytes);
        size += text_size(bytes);
        utf8_of(value, &bytes);
        size += text_size(bytes);
    }
    batch->strings += 2 * PyDict_GET_SIZE(properties);
    return size;
}

static inline Py_ssize_t
tag_size(const FieldLimits *limits, PyObject *tag, Batch *batch)
{
    if (tag != batch->tag && !same_text(tag, batch->tag))
        batch->differ_tags = 1;
    if (tag == Py_None)
        return 1;
    Py_ssize_t bytes = tag_bytes(tag, limits->tag);
    batch->has_tags = 1;
    return bytes < 0 ? -1 : text_size(bytes);
}

static inline Py_ssize_t
sharding_key_size(const FieldLimits *limits, PyObject *key, const Batch *batch)
{
    if (batch->is_one && !same_text(key, batch->sharding_key))
        return -1;
    if (key == Py_None)
        return 1;
    Py_ssize_t bytes = text_bytes(key, limits->sharding_key);
    return bytes < 0 ? -1 : text_size(bytes);
}

/* Of level and time: not both, and the same level, or times, all over a batch that is one. */
static inline Py_ssize_t
delay_size(const FieldLimits *limits, PyObject *level, PyObject *time, Batch *batch)
{
    long long level_number = number_of(level, limits->flag);
    long long time_number = number_of(time, limits->deliver_at_ms);
    if (level_number < 0 || time_number < 0 || (level_number && time_number))
        return -1;
    if (batch->is_one
            && (level_number != batch->delay_level || (time_number > 0) != batch->is_timed))
        return -1;
    return number_size(level_number) + number_size(time_number);
}

static inline Py_ssize_t
message_size(const Encoder *self, PyObject *message, Batch *batch)
{
    const MessageSlots *at = &self->message;
    const FieldLimits *limits = &self->limits.field;
    if (!Py_IS_TYPE(message, self->message_type)
            || !same_text(SLOT(message, at->topic), batch->topic))
        return -1;
    PyObject *body = SLOT(message, at->body);
    if (body == NULL || !PyBytes_CheckExact(body))
        return -1;
    Py_ssize_t body_bytes = PyBytes_GET_SIZE(body);
    if (body_bytes <= 0 || body_bytes > batch->max_body_bytes)
        return -1;
    Py_ssize_t tag = tag_size(limits, SLOT(message, at->tag), batch);
    Py_ssize_t keys = keys_size(limits, SLOT(message, at->keys), batch);
    Py_ssize_t properties = properties_size(limits, SLOT(message, at->properties), batch);
    long long flag = number_of(SLOT(message, at->flag), limits->flag);
    Py_ssize_t sharding_key = sharding_key_size(limits, SLOT(message, at->sharding_key), batch);
    Py_ssize_t delay = delay_size(
        limits, SLOT(message, at->delay_level), SLOT(message, at->deliver_at_ms), batch);
    if (tag < 0 || keys < 0 || properties < 0 || flag < 0 || sharding_key < 0 || delay < 0)
        return -1;
    Py_ssize_t topic = batch->prefix_size + PyUnicode_GET_LENGTH(batch->topic);
    return 1 + text_size(topic) + bytes_size(body_bytes) + tag + keys
        + properties + number_size(flag) + sharding_key + delay;
}

/* What the other messages are compared with; -1 where only Python can tell. */
static int
look_at_first(const Encoder *self, PyObject *first, Batch *batch)
{
    if (!Py_IS_TYPE(first, self->message_type))
        return -1;
    Py_ssize_t size;
    batch->topic = SLOT(first, self->message.topic);
    batch->tag = SLOT(first, self->message.tag);
    batch->sharding_key = SLOT(first, self->message.sharding_key);
    batch->delay_level = number_of(SLOT(first, self->message.delay_level), LLONG_MAX);
    batch->is_timed = number_of(SLOT(first, self->message.deliver_at_ms), LLONG_MAX) > 0;
    if (utf8_of(batch->topic, &size) == NULL || !PyUnicode_IS_COMPACT_ASCII(batch->topic))
        return -1;
    return 0 < size && batch->prefix_size + size <= self->limits.topic ? 0 : -1;
}

/* Of the whole batch. */
static Py_ssize_t
batch_size(const Encoder *self, PyObject *messages, Batch *batch)
{
    Py_ssize_t count = PyList_GET_SIZE(messages);
    if (count < 1 || count > self->limits.messages
            || look_at_first(self, PyList_GET_ITEM(messages, 0), batch) < 0)
        return -1;
    Py_ssize_t total = count_size(count);
    for (Py_ssize_t number = 0; number < count; number++) {
        Py_ssize_t size = message_size(self, PyList_GET_ITEM(messages, number), batch);
        if (size < 0)
            return -1;
        total += size;
        if (total > self->limits.raw_bytes || batch->strings > self->limits.strings)
            return -1;
    }
    return total;
}

/* ---- Writing ----------------------------------------------------------------------------- */

static inline unsigned char *
put_properties(unsigned char *at, PyObject *properties)
{
    if (properties == Py_None)
        return put_optional(at, properties);
    Py_ssize_t place = 0;
    PyObject *name, *value;
    at = put_count(at, (size_t)PyDict_GET_SIZE(properties), 0x80, 0xde);
    while (PyDict_Next(properties, &place, &name, &value))
        at = put_text(put_text(at, name), value);
    return at;
}

static inline unsigned char *
put_message(const MessageSlots *slots, unsigned char *at, PyObject *message, const Batch *batch)
{
    Py_ssize_t size = 0;
    const char *topic = utf8_of(batch->topic, &size);
    at = put_count(at, 9, 0x90, 0xdc);
    at = put_text_header(at, (size_t)(batch->prefix_size + size));
    memcpy(at, batch->prefix, (size_t)batch->prefix_size);
    memcpy(at + batch->prefix_size, topic, (size_t)size);
    at += batch->prefix_size + size;
    at = put_bytes(at, SLOT(message, slots->body));
    at = put_optional(at, SLOT(message, slots->tag));
    PyObject *keys = SLOT(message, slots->keys);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    at = put_count(at, (size_t)count, 0x90, 0xdc);
    for (Py_ssize_t number = 0; number < count; number++)
        at = put_text(at, PySequence_Fast_GET_ITEM(keys, number));
    at = put_properties(at, SLOT(message, slots->properties));
    at = put_number(at, SLOT(message, slots->flag));
    at = put_optional(at, SLOT(message, slots->sharding_key));
    at = put_number(at, SLOT(message, slots->delay_level));
    return put_number(at, SLOT(message, slots->deliver_at_ms));
}

static inline char *
put_place(char *at, Py_ssize_t place)
{
    unsigned number = (unsigned)place; /* payloads are below 2**32 bytes */
    memcpy(at, &number, sizeof number);
    return at + sizeof number;
}

/* Eight bytes a message, or once if all have the same tag; None if a tag was not met before. */
static PyObject *
tag_hashes(const Encoder *self, PyObject *messages, const Batch *batch)
{
    Py_ssize_t count = !batch->has_tags ? 0 : batch->differ_tags ? PyList_GET_SIZE(messages) : 1;
    PyObject *hashes = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (hashes == NULL)
        return NULL;
    PyObject *before = NULL;
    char *at = PyBytes_AS_STRING(hashes);
    for (Py_ssize_t number = 0; number < count; number++, at += 8) {
        PyObject *tag = SLOT(PyList_GET_ITEM(messages, number), self->message.tag);
        if (tag == Py_None) {
            memset(at, 0, 8);
        } else if (tag == before) {
            memcpy(at, at - 8, 8);
        } else {
            PyObject *found = PyDict_GetItemWithError(self->hashes, tag);
            if (found == NULL || !PyBytes_CheckExact(found) || PyBytes_GET_SIZE(found) != 8) {
                Py_DECREF(hashes);
                return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
            }
            memcpy(at, PyBytes_AS_STRING(found), 8);
        }
        before = tag;
    }
    return hashes;
}

PyDoc_STRVAR(encode_doc,
"encode(messages, max_body_bytes, is_one, with_places, prefix)\n--\n\n"
"The encoded messages, with a prefix in front of each topic, whether one has keys, their tag hashes (None if a tag is not known), and if\n"
"wanted where each begins and the last one ends (unsigned ints); None if they are not for it.");

static PyObject *
encoder_encode(Encoder *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !PyLong_Check(args[1]) || !PyBool_Check(args[2]) || !PyBool_Check(args[3])
            || !PyUnicode_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "encode takes messages, a number, two bools and a text");
        return NULL;
    }
    Batch batch = {0};
    batch.prefix = PyUnicode_AsUTF8AndSize(args[4], &batch.prefix_size);
    if (batch.prefix == NULL)
        return NULL;
    batch.max_body_bytes = PyLong_AsSsize_t(args[1]);
    if (batch.max_body_bytes == -1 && PyErr_Occurred())
        return NULL;
    batch.is_one = args[2] == Py_True;
    batch.reserved = batch.is_one ? self->reserved : NULL;
    PyObject *messages = args[0];
    if (!PyList_CheckExact(messages))
        Py_RETURN_NONE;
    Py_ssize_t size = batch_size(self, messages, &batch);
    if (size < 0)
        Py_RETURN_NONE;
    Py_ssize_t place_count = args[3] == Py_True ? PyList_GET_SIZE(messages) + 1 : 0;
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    PyObject *places = PyBytes_FromStringAndSize(NULL, place_count * (Py_ssize_t)sizeof(unsigned));
    if (data == NULL || places == NULL) {
        Py_XDECREF(data);
        Py_XDECREF(places);
        return NULL;
    }
    char *place = PyBytes_AS_STRING(places);
    unsigned char *begin = (unsigned char *)PyBytes_AS_STRING(data);
    unsigned char *at = put_count(begin, (size_t)PyList_GET_SIZE(messages), 0x90, 0xdc);
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(messages); number++) {
        if (place_count)
            place = put_place(place, at - begin);
        at = put_message(&self->message, at, PyList_GET_ITEM(messages, number), &batch);
    }
    if (place_count)
        put_place(place, at - begin);
    assert(at == begin + size);
    PyObject *hashes = tag_hashes(self, messages, &batch);
    if (hashes == NULL) {
        Py_DECREF(data);
        Py_DECREF(places);
        return NULL;
    }
    return Py_BuildValue("NNNN", data, PyBool_FromLong(batch.has_keys), hashes, places);
}

/* ---- The object -------------------------------------------------------------------------- */

static PyObject *
encoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"message_type", "hashes", "reserved", "limits", "field_limits", NULL};
    PyTypeObject *message_type;
    PyObject *hashes, *reserved;
    Limits limits;
    FieldLimits *field = &limits.field;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O!O!O!(nnnn)(nnnnnnn):Encoder", names, &PyType_Type, &message_type,
            &PyDict_Type, &hashes, &PyFrozenSet_Type, &reserved, &limits.messages, &limits.raw_bytes, &limits.strings,
            &limits.topic, &field->tag, &field->keys, &field->key, &field->sharding_key,
            &field->properties, &field->flag, &field->deliver_at_ms))
        return NULL;
    /* Headers of texts are written up to 16 bits, of a character in up to 4 bytes. */
    if (limits.topic > 65535 || field->tag > 16383 || field->key > 16383
            || field->sharding_key > 16383 || field->properties > 65535
            || limits.raw_bytes > 0xffffffffL || limits.messages > 0xffffffffL) {
        PyErr_SetString(PyExc_ValueError, "a limit is beyond what can be written");
        return NULL;
    }
    Encoder *self = (Encoder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->message_type = (PyTypeObject *)Py_NewRef(message_type);
    self->hashes = Py_NewRef(hashes);
    self->reserved = Py_NewRef(reserved);
    self->limits = limits;
    if (mq_find_message_slots(message_type, &self->message) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
encoder_dealloc(Encoder *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->message_type);
    Py_XDECREF(self->hashes);
    Py_XDECREF(self->reserved);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef encoder_methods[] = {
    {"encode", (PyCFunction)encoder_encode, METH_FASTCALL, encode_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot encoder_slots[] = {
    {Py_tp_doc, "Encodes messages; see mqmesh.batch.native_encode."},
    {Py_tp_new, encoder_new},
    {Py_tp_dealloc, encoder_dealloc},
    {Py_tp_methods, encoder_methods},
    {0, NULL},
};

PyType_Spec mq_encoder_spec = {
    .name = "mqmesh._native.Encoder",
    .basicsize = sizeof(Encoder),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = encoder_slots,
};
