/* Decodes the messages of a batch at once; see fast_decode.py.

   What it reads comes from anywhere. It takes only what it is sure to read as the careful way
   would; at the first byte that is otherwise it gives up, and that way reads all of it, and tells
   what is wrong. Nothing is believed of a length but that so many bytes are there. */

#include "_plain_message.h"

typedef struct {
    Py_ssize_t max_strings, max_tag_length, max_keys, max_key_length, max_sharding_key_length;
    Py_ssize_t max_flag;
} Limits;

typedef struct {
    PyObject_HEAD
    PyTypeObject *message_type;
    PyObject *no_keys, *zero;
    MessageSlots message;
    Py_ssize_t queue_offset, batch;
    Limits limits;
} Decoder;

/* Where reading has got to, and what the next message may share with the one before. */
typedef struct {
    const unsigned char *at, *end;
    PyObject *topic, *tag; /* borrowed, and owned or NULL */
    Py_ssize_t strings;
} Reading;

/* ---- Reading: 0 or a borrowed address where something is as it should be, -1 or NULL for not -- */

/* A number of so many bytes, big endian, or -1. */
static inline Py_ssize_t
read_number(Reading *reading, int width)
{
    if (reading->end - reading->at < width)
        return -1;
    Py_ssize_t number = 0;
    for (int byte = 0; byte < width; byte++)
        number = number << 8 | *reading->at++;
    return number;
}

static inline int
read_byte(Reading *reading, unsigned char wanted)
{
    if (reading->at == reading->end || *reading->at != wanted)
        return -1;
    reading->at++;
    return 0;
}

static inline const unsigned char *
read_bytes(Reading *reading, Py_ssize_t length)
{
    if (length < 0 || reading->end - reading->at < length)
        return NULL;
    const unsigned char *found = reading->at;
    reading->at += length;
    return found;
}

/* A text's bytes, which may be anything. */
static inline const unsigned char *
read_text(Reading *reading, Py_ssize_t *length)
{
    if (reading->at == reading->end)
        return NULL;
    unsigned char code = *reading->at++;
    if ((code & 0xe0) == 0xa0)
        *length = code & 0x1f;
    else if (code == 0xd9)
        *length = read_number(reading, 1);
    else if (code == 0xda)
        *length = read_number(reading, 2);
    else
        return NULL;
    return read_bytes(reading, *length);
}

/* How many elements an array has, up to 65,535. */
static inline Py_ssize_t
read_array(Reading *reading)
{
    if (reading->at == reading->end)
        return -1;
    unsigned char code = *reading->at++;
    if ((code & 0xf0) == 0x90)
        return code & 0x0f;
    return code == 0xdc ? read_number(reading, 2) : -1;
}

/* ---- Objects: NULL with an error set, or without one where the careful way must read ------- */

static inline PyObject *
make_text(const unsigned char *text, Py_ssize_t length)
{
    for (Py_ssize_t place = 0; place < length; place++)
        if (text[place] >= 0x80)
            return NULL;
    PyObject *made = PyUnicode_New(length, 127);
    if (made != NULL)
        memcpy(PyUnicode_1BYTE_DATA(made), text, (size_t)length);
    return made;
}

static inline PyObject *
read_ascii(Reading *reading, Py_ssize_t max_length)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    return text == NULL || length < 1 || length > max_length ? NULL : make_text(text, length);
}

static inline PyObject *
read_body(Reading *reading)
{
    if (reading->at == reading->end)
        return NULL;
    unsigned char code = *reading->at++;
    Py_ssize_t length = code == 0xc4 ? read_number(reading, 1)
        : code == 0xc5 ? read_number(reading, 2)
        : code == 0xc6 ? read_number(reading, 4) : -1;
    const unsigned char *body = read_bytes(reading, length);
    return body == NULL ? NULL : PyBytes_FromStringAndSize((const char *)body, length);
}

static inline PyObject *
read_optional(Reading *reading, Py_ssize_t max_length)
{
    if (read_byte(reading, 0xc0) == 0)
        return Py_NewRef(Py_None);
    return read_ascii(reading, max_length);
}

/* Messages side by side often have the same tag: one object does for all. */
static inline PyObject *
read_tag(const Decoder *self, Reading *reading)
{
    if (read_byte(reading, 0xc0) == 0)
        return Py_NewRef(Py_None);
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    if (text == NULL || length < 1 || length > self->limits.max_tag_length)
        return NULL;
    if (reading->tag == NULL || PyUnicode_GET_LENGTH(reading->tag) != length
            || memcmp(PyUnicode_1BYTE_DATA(reading->tag), text, (size_t)length) != 0) {
        PyObject *tag = make_text(text, length);
        if (tag == NULL)
            return NULL;
        Py_XSETREF(reading->tag, tag);
    }
    return Py_NewRef(reading->tag);
}

static inline PyObject *
read_keys(const Decoder *self, Reading *reading)
{
    Py_ssize_t count = read_array(reading);
    if (count == 0)
        return Py_NewRef(self->no_keys);
    if (count < 0 || count > self->limits.max_keys)
        return NULL;
    reading->strings += count;
    if (reading->strings > self->limits.max_strings)
        return NULL;
    PyObject *keys = PyTuple_New(count);
    for (Py_ssize_t number = 0; keys != NULL && number < count; number++) {
        PyObject *key = read_ascii(reading, self->limits.max_key_length);
        if (key == NULL)
            Py_CLEAR(keys);
        else
            PyTuple_SET_ITEM(keys, number, key);
    }
    return keys;
}

static inline PyObject *
read_flag(const Decoder *self, Reading *reading)
{
    if (reading->at == reading->end)
        return NULL;
    unsigned char code = *reading->at++;
    if (code == 0)
        return Py_NewRef(self->zero);
    Py_ssize_t flag = code < 0x80 ? code
        : code == 0xcc ? read_number(reading, 1)
        : code == 0xcd ? read_number(reading, 2)
        : code == 0xce ? read_number(reading, 4) : -1;
    return flag < 0 || flag > self->limits.max_flag ? NULL : PyLong_FromSsize_t(flag);
}

static inline int
read_topic(Reading *reading)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    return text != NULL && length == PyUnicode_GET_LENGTH(reading->topic)
        && memcmp(text, PyUnicode_1BYTE_DATA(reading->topic), (size_t)length) == 0 ? 0 : -1;
}

static inline PyObject *
read_message(const Decoder *self, Reading *reading, long long queue_offset, PyObject *batch)
{
    const MessageSlots *at = &self->message;
    if (read_byte(reading, 0x99) < 0 || read_topic(reading) < 0)
        return NULL;
    PyObject *message = self->message_type->tp_alloc(self->message_type, 0);
    if (message == NULL)
        return NULL;
    /* One that is not whole yet is freed like any other: its slots hold something, or nothing. */
    if ((SLOT(message, at->body) = read_body(reading)) == NULL
            || (SLOT(message, at->tag) = read_tag(self, reading)) == NULL
            || (SLOT(message, at->keys) = read_keys(self, reading)) == NULL
            || read_byte(reading, 0xc0) < 0
            || (SLOT(message, at->flag) = read_flag(self, reading)) == NULL
            || (SLOT(message, at->sharding_key)
                = read_optional(reading, self->limits.max_sharding_key_length)) == NULL
            || read_byte(reading, 0) < 0 || read_byte(reading, 0) < 0
            || (SLOT(message, self->queue_offset) = PyLong_FromLongLong(queue_offset)) == NULL) {
        Py_DECREF(message);
        return NULL;
    }
    SLOT(message, at->topic) = Py_NewRef(reading->topic);
    SLOT(message, at->properties) = Py_NewRef(Py_None);
    SLOT(message, at->delay_level) = Py_NewRef(self->zero);
    SLOT(message, at->deliver_at_ms) = Py_NewRef(self->zero);
    SLOT(message, self->batch) = Py_NewRef(batch);
    return message;
}

static PyObject *
read_messages(const Decoder *self, Reading *reading, Py_ssize_t count, long long first_offset,
              PyObject *batch)
{
    /* A message takes 12 bytes at least: no list is made for messages that cannot be there. */
    if (read_array(reading) != count || count > (reading->end - reading->at) / 12)
        return NULL;
    PyObject *messages = PyList_New(count);
    /* Up to Python 3.11 a tuple of keys may set off the collector, and what that calls must not
       find a list with holes. */
    if (messages != NULL)
        PyObject_GC_UnTrack(messages);
    for (Py_ssize_t number = 0; messages != NULL && number < count; number++) {
        PyObject *message = read_message(self, reading, first_offset + number, batch);
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
"decode(payload, count, topic, first_offset, batch)\n--\n\n"
"The messages of a payload with their places; None if they are not for it.");

static PyObject *
decoder_decode(Decoder *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 5 || !PyUnicode_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError,
                        "decode takes a payload, a count, a topic, an offset and a batch");
        return NULL;
    }
    Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    long long first_offset = PyLong_AsLongLong(args[3]);
    if (first_offset == -1 && PyErr_Occurred())
        return NULL;
    if (!PyUnicode_CheckExact(args[2]) || !PyUnicode_IS_COMPACT_ASCII(args[2])
            || count < 1 || first_offset < 0 || first_offset > LLONG_MAX - count)
        Py_RETURN_NONE;
    Py_buffer payload;
    if (PyObject_GetBuffer(args[0], &payload, PyBUF_SIMPLE) < 0)
        return NULL;
    const unsigned char *begin = payload.buf;
    Reading reading = {begin, begin + payload.len, args[2], NULL, 0};
    PyObject *messages = read_messages(self, &reading, count, first_offset, args[4]);
    Py_XDECREF(reading.tag);
    PyBuffer_Release(&payload);
    if (messages == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return messages;
}

/* ---- The object -------------------------------------------------------------------------- */

static PyObject *
decoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"message_type", "no_keys", "limits", NULL};
    PyTypeObject *message_type;
    PyObject *no_keys;
    Limits limits;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O!O!(nnnnnn):Decoder", names, &PyType_Type, &message_type,
            &PyTuple_Type, &no_keys, &limits.max_strings, &limits.max_tag_length,
            &limits.max_keys, &limits.max_key_length, &limits.max_sharding_key_length,
            &limits.max_flag))
        return NULL;
    if (PyType_IS_GC(message_type)) {
        PyErr_Format(PyExc_TypeError, "%s is tracked by the collector", message_type->tp_name);
        return NULL;
    }
    Decoder *self = (Decoder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->message_type = (PyTypeObject *)Py_NewRef(message_type);
    self->no_keys = Py_NewRef(no_keys);
    self->limits = limits;
    self->zero = PyLong_FromLong(0);
    if (self->zero == NULL || find_message_slots(message_type, &self->message) < 0
            || find_slot(message_type, "queue_offset", &self->queue_offset) < 0
            || find_slot(message_type, "batch", &self->batch) < 0) {
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
    Py_XDECREF(self->no_keys);
    Py_XDECREF(self->zero);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef decoder_methods[] = {
    {"decode", (PyCFunction)decoder_decode, METH_FASTCALL, decode_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_doc, "Decodes plain messages; see mqmesh.fast_decode."},
    {Py_tp_new, decoder_new},
    {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_methods, decoder_methods},
    {0, NULL},
};

static PyType_Spec decoder_spec = {
    .name = "mqmesh._fast_decode.Decoder",
    .basicsize = sizeof(Decoder),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = decoder_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&decoder_spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Decoder", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mqmesh._fast_decode",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__fast_decode(void)
{
    return PyModuleDef_Init(&module_def);
}
