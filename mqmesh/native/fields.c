/* What is looked at of messages that were decoded; see native_decode.py.

   Fields are descriptors that stand in the class in place of those in Python. They do what is
   usual, and leave all else to them. */

#include "decode.h"

typedef enum { KEYS_OR_PROPERTIES, MESSAGE_ID, OF_BATCH } Kind;

typedef struct {
    PyObject_HEAD
    Decoder *decoder;
    PyObject *otherwise;
    Kind kind;
    Py_ssize_t place; /* of the slot, in the message or in the batch */
} Field;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Decoder *decoder;
    PyObject *otherwise;
} PropertyMethod;

/* ---- Keys and properties when they are looked at ------------------------------------------ */

/* Of what keep_encoded has checked; so NULL means that memory is short. */
static PyObject *
make_keys(Reading *reading, PyObject *no_keys)
{
    Py_ssize_t count = read_array(reading);
    if (count <= 0)
        return Py_NewRef(no_keys);
    PyObject *keys = PyTuple_New(count);
    for (Py_ssize_t number = 0; keys != NULL && number < count; number++) {
        PyObject *key = make_limited(reading, PY_SSIZE_T_MAX);
        if (key == NULL)
            Py_CLEAR(keys);
        else
            PyTuple_SET_ITEM(keys, number, key);
    }
    if (keys != NULL)
        PyObject_GC_UnTrack(keys); /* texts make no circles */
    return keys;
}

/* A property's name: messages have few of them, so one object does for all that were made lately. */
static PyObject *
make_name(Decoder *self, Reading *reading)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    if (text == NULL)
        return NULL;
    if (length < 1 || length > SHARED_NAME_BYTES)
        return make_text(text, length);
    size_t mixed = (size_t)length * 31 + text[0] * 7u + text[length - 1] * 3u + text[length / 2];
    PyObject **place = &self->names[mixed % SHARED_NAMES];
    if (*place != NULL && PyUnicode_GET_LENGTH(*place) == length
            && memcmp(PyUnicode_1BYTE_DATA(*place), text, (size_t)length) == 0)
        return Py_NewRef(*place);
    PyObject *name = make_text(text, length);
    if (name != NULL && PyUnicode_IS_COMPACT_ASCII(name))
        Py_XSETREF(*place, Py_NewRef(name));
    return name;
}

static PyObject *
make_any(Reading *reading)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    return text == NULL ? NULL : make_text(text, length);
}

static PyObject *
make_properties(Decoder *self, Reading *reading)
{
    if (read_this(reading, 0xc0) == 0)
        return Py_NewRef(Py_None);
    Py_ssize_t count = read_map(reading);
    PyObject *properties = PyDict_New();
    for (Py_ssize_t number = 0; properties != NULL && number < count; number++) {
        PyObject *name = make_name(self, reading);
        PyObject *value = name == NULL ? NULL : make_any(reading);
        if (value == NULL || PyDict_SetItem(properties, name, value) < 0)
            Py_CLEAR(properties);
        Py_XDECREF(name);
        Py_XDECREF(value);
    }
    return properties;
}

/* What a message has encoded still; borrowed, NULL for nothing. */
static inline PyObject *
encoded_of(const Decoder *self, PyObject *message)
{
    PyObject *encoded = SLOT(message, self->message.properties);
    int is_encoded = SLOT(message, self->message.keys) == NULL
        && encoded != NULL && PyBytes_CheckExact(encoded);
    return is_encoded ? encoded : NULL;
}

static inline Reading
reading_of(PyObject *encoded)
{
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(encoded);
    return (Reading){at, at + PyBytes_GET_SIZE(encoded)};
}

/* Makes keys and properties, if the message has them encoded still. */
static int
look(Decoder *self, PyObject *message)
{
    PyObject *encoded = Py_XNewRef(encoded_of(self, message));
    if (encoded == NULL)
        return 0;
    Reading reading = reading_of(encoded);
    PyObject *keys = make_keys(&reading, self->no_keys);
    PyObject *properties = keys == NULL ? NULL : make_properties(self, &reading);
    /* The collector may have run, and whom it calls may have looked. */
    if (properties != NULL && encoded_of(self, message) == encoded) {
        SLOT(message, self->message.keys) = Py_NewRef(keys);
        SLOT(message, self->message.properties) = Py_NewRef(properties);
        Py_DECREF(encoded);
    }
    Py_DECREF(encoded);
    int failed = properties == NULL;
    Py_XDECREF(keys);
    Py_XDECREF(properties);
    if (failed && !PyErr_Occurred())
        PyErr_NoMemory();
    return failed ? -1 : 0;
}

/* ---- Message ids ------------------------------------------------------------------------- */

static void
put_hex(char *at, unsigned long long number)
{
    /* Eight digits at once, each in a byte. */
    for (int half = 0; half < 2; half++, number <<= 32) {
        unsigned long long digits = number >> 32;
        digits = (digits | digits << 16) & 0x0000ffff0000ffffULL;
        digits = (digits | digits << 8) & 0x00ff00ff00ff00ffULL;
        digits = (digits | digits << 4) & 0x0f0f0f0f0f0f0f0fULL;
        unsigned long long letters = (digits + 0x0606060606060606ULL) >> 4 & 0x0101010101010101ULL;
        digits += 0x3030303030303030ULL + letters * ('A' - '0' - 10);
        for (int digit = 0; digit < 8; digit++)
            at[half * 8 + digit] = (char)(digits >> (56 - 8 * digit));
    }
}

/* NULL without an error where only Python can tell. */
static PyObject *
make_message_id(const Decoder *self, PyObject *message, PyObject *batch)
{
    PyObject *producer = SLOT(batch, self->info.producer_id);
    PyObject *sequence = SLOT(batch, self->info.first_sequence);
    long long base = number_of(SLOT(batch, self->info.base_queue_offset), LLONG_MAX);
    long long offset = number_of(SLOT(message, self->queue_offset), LLONG_MAX);
    if (base < 0 || offset < base || producer == NULL || !PyLong_CheckExact(producer)
            || sequence == NULL || !PyLong_CheckExact(sequence))
        return NULL;
    unsigned long long producer_id = PyLong_AsUnsignedLongLong(producer);
    unsigned long long first = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(sequence);
    if (PyErr_Occurred() || first > ULLONG_MAX - (unsigned long long)(offset - base)) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *text = PyUnicode_New(32, 127);
    if (text == NULL)
        return NULL;
    char *at = (char *)PyUnicode_1BYTE_DATA(text);
    put_hex(at, producer_id);
    put_hex(at + 16, first + (unsigned long long)(offset - base));
    return text;
}

/* ---- Fields ------------------------------------------------------------------------------ */

static PyObject *
field_get(PyObject *object, PyObject *message, PyObject *type)
{
    Field *self = (Field *)object;
    Decoder *decoder = self->decoder;
    PyObject *found = NULL;
    if (message == NULL)
        return Py_NewRef(self->otherwise);
    if (Py_IS_TYPE(message, decoder->message_type)) {
        PyObject *batch = SLOT(message, decoder->batch);
        if (self->kind == KEYS_OR_PROPERTIES) {
            if (look(decoder, message) < 0)
                return NULL;
            found = Py_XNewRef(SLOT(message, self->place));
        } else if (batch != NULL && Py_IS_TYPE(batch, decoder->batch_type)) {
            found = self->kind == OF_BATCH ? Py_XNewRef(SLOT(batch, self->place))
                : make_message_id(decoder, message, batch);
        }
        if (found != NULL || PyErr_Occurred())
            return found;
    }
    return Py_TYPE(self->otherwise)->tp_descr_get(self->otherwise, message, type);
}

static int
field_set(PyObject *object, PyObject *message, PyObject *value)
{
    Field *self = (Field *)object;
    if (Py_IS_TYPE(message, self->decoder->message_type) && look(self->decoder, message) < 0)
        return -1;
    return Py_TYPE(self->otherwise)->tp_descr_set(self->otherwise, message, value);
}

static PyObject *
field_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"decoder", "name", "otherwise", NULL};
    PyObject *decoder, *otherwise;
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsO:Field", names, &decoder, &name, &otherwise))
        return NULL;
    if (strcmp(Py_TYPE(decoder)->tp_name, mq_decoder_spec.name) != 0
            || Py_TYPE(otherwise)->tp_descr_get == NULL
            || Py_TYPE(otherwise)->tp_descr_set == NULL) {
        PyErr_SetString(PyExc_TypeError, "a field is made of a Decoder, a name and a descriptor");
        return NULL;
    }
    Field *self = (Field *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->decoder = (Decoder *)Py_NewRef(decoder);
    self->otherwise = Py_NewRef(otherwise);
    const MessageSlots *slots = &self->decoder->message;
    int failed = 0;
    if (strcmp(name, "keys") == 0 || strcmp(name, "properties") == 0) {
        self->kind = KEYS_OR_PROPERTIES;
        self->place = name[0] == 'k' ? slots->keys : slots->properties;
    } else if (strcmp(name, "message_id") == 0) {
        self->kind = MESSAGE_ID;
    } else {
        self->kind = OF_BATCH;
        failed = mq_find_slot(self->decoder->batch_type, name, &self->place);
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
field_dealloc(Field *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->decoder);
    Py_XDECREF(self->otherwise);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef field_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Field, otherwise), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot field_slots[] = {
    {Py_tp_doc, "A field of messages that were decoded; see mqmesh.batch.native_decode."},
    {Py_tp_new, field_new},
    {Py_tp_dealloc, field_dealloc},
    {Py_tp_descr_get, field_get},
    {Py_tp_descr_set, field_set},
    {Py_tp_members, field_members},
    {0, NULL},
};

PyType_Spec mq_field_spec = {
    .name = "mqmesh._native.Field",
    .basicsize = sizeof(Field),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = field_slots,
};

/* ---- StoredMessage.property --------------------------------------------------------------- */

/* A property of those encoded, the last one of that name; borrowed bytes, NULL for none. */
static const unsigned char *
find_property(const Decoder *self, PyObject *encoded, PyObject *name, Py_ssize_t *found_size)
{
    Reading reading = reading_of(encoded);
    Py_ssize_t name_size, size, count;
    const unsigned char *found = NULL, *text;
    const char *name_bytes = utf8_of(name, &name_size);
    if (name_bytes == NULL || skip_keys(&reading, &self->limits) < 0)
        return NULL;
    count = read_map(&reading); /* -1 for none at all */
    for (Py_ssize_t number = 0; number < count; number++) {
        text = read_text(&reading, &size);
        int is_it = text != NULL && size == name_size
            && memcmp(text, name_bytes, (size_t)size) == 0;
        text = read_text(&reading, &size);
        if (text == NULL)
            return NULL;
        if (is_it) {
            found = text;
            *found_size = size;
        }
    }
    return found;
}

static PyObject *
property_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    PropertyMethod *self = (PropertyMethod *)object;
    const Decoder *decoder = self->decoder;
    Py_ssize_t given = PyVectorcall_NARGS(flags);
    PyObject *encoded = NULL;
    if ((given == 2 || given == 3) && names == NULL && PyUnicode_CheckExact(args[1])
            && Py_IS_TYPE(args[0], decoder->message_type))
        encoded = Py_XNewRef(encoded_of(decoder, args[0]));
    if (encoded == NULL)
        return PyObject_Vectorcall(self->otherwise, args, flags, names);
    Py_ssize_t size = 0;
    const unsigned char *text = find_property(decoder, encoded, args[1], &size);
    PyObject *found = text != NULL ? make_text(text, size)
        : Py_NewRef(given == 3 ? args[2] : Py_None);
    Py_DECREF(encoded);
    return found;
}

static PyObject *
property_get(PyObject *object, PyObject *message, PyObject *type)
{
    (void)type;
    return message == NULL ? Py_NewRef(object) : PyMethod_New(object, message);
}

static PyObject *
property_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"decoder", "otherwise", NULL};
    PyObject *decoder, *otherwise;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO:PropertyMethod", names, &decoder, &otherwise))
        return NULL;
    if (strcmp(Py_TYPE(decoder)->tp_name, mq_decoder_spec.name) != 0
            || !PyCallable_Check(otherwise)) {
        PyErr_SetString(PyExc_TypeError, "the method is made of a Decoder and a function");
        return NULL;
    }
    PropertyMethod *self = (PropertyMethod *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = property_call;
    self->decoder = (Decoder *)Py_NewRef(decoder);
    self->otherwise = Py_NewRef(otherwise);
    return (PyObject *)self;
}

static void
property_dealloc(PropertyMethod *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->decoder);
    Py_XDECREF(self->otherwise);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef property_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PropertyMethod, vectorcall), READONLY, NULL},
    {"__wrapped__", T_OBJECT, offsetof(PropertyMethod, otherwise), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot property_slots[] = {
    {Py_tp_doc, "StoredMessage.property; see mqmesh.batch.native_decode."},
    {Py_tp_new, property_new},
    {Py_tp_dealloc, property_dealloc},
    {Py_tp_descr_get, property_get},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, property_members},
    {0, NULL},
};

PyType_Spec mq_property_spec = {
    .name = "mqmesh._native.PropertyMethod",
    .basicsize = sizeof(PropertyMethod),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = property_slots,
};
