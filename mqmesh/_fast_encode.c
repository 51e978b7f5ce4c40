/* Checks and encodes the messages of a batch at once; see fast_encode.py.

   It does what message_checks.check_messages and payload.encode_payload do, for messages that
   want nothing unusual. All others are left to Python.

   The messages are looked at twice, for what they need and to be written. In between no Python code
   is called and the interpreter is not given away, so they are the same both times. */

#include "_plain_message.h"

/* What a batch holds at most; what it means stands where Python has it. */
typedef struct {
    Py_ssize_t max_messages, max_raw_bytes, max_strings;
    Py_ssize_t max_topic_length, max_tag_length, max_keys, max_key_length, max_sharding_key_length;
    Py_ssize_t max_flag;
} Limits;

typedef struct {
    PyObject_HEAD
    PyTypeObject *message_type;
    PyObject *zero;
    MessageSlots message;
    Limits limits;
} Encoder;

/* What all messages of a batch have in common, and what was found among them. */
typedef struct {
    PyObject *topic, *sharding_key;
    Py_ssize_t max_body_bytes, strings;
    int has_keys, has_tags;
} Batch;

/* ---- msgpack ----------------------------------------------------------------------------- */

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
number_size(long number)
{
    return number < 128 ? 1 : number < 256 ? 2 : number < 65536 ? 3 : 5;
}

static inline Py_ssize_t
array_size(Py_ssize_t count)
{
    return count < 16 ? 1 : count < 65536 ? 3 : 5;
}

static inline unsigned char *
put_big_endian(unsigned char *at, size_t number, int width)
{
    for (int byte = width - 1; byte >= 0; byte--)
        *at++ = (unsigned char)(number >> (8 * byte));
    return at;
}

/* The header of something of a size: short forms up to 8, 16 and 32 bits, whose codes follow one
   another. */
static inline unsigned char *
put_header(unsigned char *at, unsigned char code, size_t size, int width)
{
    *at++ = code;
    return put_big_endian(at, size, width);
}

static inline unsigned char *
put_text(unsigned char *at, PyObject *text)
{
    size_t length = (size_t)PyUnicode_GET_LENGTH(text);
    if (length < 32)
        *at++ = (unsigned char)(0xa0 | length);
    else if (length < 256)
        at = put_header(at, 0xd9, length, 1);
    else
        at = put_header(at, 0xda, length, 2);
    memcpy(at, PyUnicode_1BYTE_DATA(text), length);
    return at + length;
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

static inline unsigned char *
put_array(unsigned char *at, size_t count)
{
    if (count < 16) {
        *at = (unsigned char)(0x90 | count);
        return at + 1;
    }
    return count < 65536 ? put_header(at, 0xdc, count, 2) : put_header(at, 0xdd, count, 4);
}

static inline unsigned char *
put_number(unsigned char *at, size_t number)
{
    if (number < 128) {
        *at = (unsigned char)number;
        return at + 1;
    }
    if (number < 256)
        return put_header(at, 0xcc, number, 1);
    return number < 65536 ? put_header(at, 0xcd, number, 2) : put_header(at, 0xce, number, 4);
}

/* ---- Looking: what parts of a message need, -1 where only Python can tell ---------------- */

static inline int
same_text(PyObject *text, PyObject *other)
{
    if (text == other)
        return 1;
    if (text == NULL || other == NULL || !PyUnicode_CheckExact(text) || !PyUnicode_CheckExact(other)
            || !PyUnicode_IS_COMPACT_ASCII(text) || !PyUnicode_IS_COMPACT_ASCII(other))
        return 0;
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    return length == PyUnicode_GET_LENGTH(other)
        && memcmp(PyUnicode_1BYTE_DATA(text), PyUnicode_1BYTE_DATA(other), (size_t)length) == 0;
}

static inline Py_ssize_t
keys_size(const Encoder *self, PyObject *keys, Batch *batch)
{
    Py_ssize_t count = key_count(keys, self->limits.max_keys);
    if (count < 0)
        return -1;
    Py_ssize_t size = array_size(count);
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *key = PySequence_Fast_GET_ITEM(keys, number);
        Py_ssize_t length = ascii_length(key, self->limits.max_key_length);
        if (length < 0)
            return -1;
        size += text_size(length);
    }
    batch->strings += count;
    batch->has_keys |= count > 0;
    return size;
}

static inline Py_ssize_t
tag_size(const Encoder *self, PyObject *tag, Batch *batch)
{
    if (tag == Py_None)
        return 1;
    Py_ssize_t length = tag_length(tag, self->limits.max_tag_length);
    batch->has_tags = 1;
    return length < 0 ? -1 : text_size(length);
}

static inline Py_ssize_t
sharding_key_size(const Encoder *self, PyObject *key, const Batch *batch)
{
    if (batch->sharding_key != NULL && !same_text(key, batch->sharding_key))
        return -1;
    if (key == Py_None)
        return 1;
    Py_ssize_t length = ascii_length(key, self->limits.max_sharding_key_length);
    return length < 0 ? -1 : text_size(length);
}

static inline Py_ssize_t
flag_size(const Encoder *self, PyObject *flag)
{
    if (flag == self->zero)
        return 1;
    if (flag == NULL || !PyLong_CheckExact(flag))
        return -1;
    int overflow;
    long number = PyLong_AsLongAndOverflow(flag, &overflow);
    return overflow || number < 0 || number > self->limits.max_flag ? -1 : number_size(number);
}

static inline Py_ssize_t
message_size(const Encoder *self, PyObject *message, Batch *batch)
{
    const MessageSlots *at = &self->message;
    if (!Py_IS_TYPE(message, self->message_type) || !same_text(SLOT(message, at->topic), batch->topic)
            || SLOT(message, at->properties) != Py_None
            || SLOT(message, at->delay_level) != self->zero
            || SLOT(message, at->deliver_at_ms) != self->zero)
        return -1;
    PyObject *body = SLOT(message, at->body);
    if (body == NULL || !PyBytes_CheckExact(body))
        return -1;
    Py_ssize_t body_bytes = PyBytes_GET_SIZE(body);
    if (body_bytes <= 0 || body_bytes > batch->max_body_bytes)
        return -1;
    Py_ssize_t tag = tag_size(self, SLOT(message, at->tag), batch);
    Py_ssize_t keys = keys_size(self, SLOT(message, at->keys), batch);
    Py_ssize_t sharding_key = sharding_key_size(self, SLOT(message, at->sharding_key), batch);
    Py_ssize_t flag = flag_size(self, SLOT(message, at->flag));
    if (tag < 0 || keys < 0 || sharding_key < 0 || flag < 0)
        return -1;
    /* The array's header, properties, level and time of a delay take a byte each. */
    return 4 + text_size(PyUnicode_GET_LENGTH(batch->topic)) + bytes_size(body_bytes)
        + tag + keys + sharding_key + flag;
}

/* Of the whole batch. */
static Py_ssize_t
batch_size(const Encoder *self, PyObject *messages, int one_sharding_key, Batch *batch)
{
    Py_ssize_t count = PyList_GET_SIZE(messages);
    if (count < 1 || count > self->limits.max_messages)
        return -1;
    PyObject *first = PyList_GET_ITEM(messages, 0);
    if (!Py_IS_TYPE(first, self->message_type))
        return -1;
    batch->topic = SLOT(first, self->message.topic);
    batch->sharding_key = one_sharding_key ? SLOT(first, self->message.sharding_key) : NULL;
    if (ascii_length(batch->topic, self->limits.max_topic_length) < 0)
        return -1;
    Py_ssize_t total = array_size(count);
    for (Py_ssize_t number = 0; number < count; number++) {
        Py_ssize_t size = message_size(self, PyList_GET_ITEM(messages, number), batch);
        if (size < 0)
            return -1;
        total += size;
        if (total > self->limits.max_raw_bytes || batch->strings > self->limits.max_strings)
            return -1;
    }
    return total;
}

/* ---- Writing ----------------------------------------------------------------------------- */

static inline unsigned char *
put_message(const Encoder *self, unsigned char *at, PyObject *message)
{
    const MessageSlots *slots = &self->message;
    at = put_array(at, 9);
    at = put_text(at, SLOT(message, slots->topic));
    at = put_bytes(at, SLOT(message, slots->body));
    PyObject *tag = SLOT(message, slots->tag), *keys = SLOT(message, slots->keys);
    if (tag == Py_None)
        *at++ = 0xc0;
    else
        at = put_text(at, tag);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    at = put_array(at, (size_t)count);
    for (Py_ssize_t number = 0; number < count; number++)
        at = put_text(at, PySequence_Fast_GET_ITEM(keys, number));
    *at++ = 0xc0; /* properties */
    PyObject *flag = SLOT(message, slots->flag);
    at = put_number(at, flag == self->zero ? 0 : (size_t)PyLong_AsLong(flag));
    PyObject *sharding_key = SLOT(message, slots->sharding_key);
    if (sharding_key == Py_None)
        *at++ = 0xc0;
    else
        at = put_text(at, sharding_key);
    *at++ = 0; /* level and time of a delay */
    *at++ = 0;
    return at;
}

PyDoc_STRVAR(encode_doc,
"encode(messages, max_body_bytes, one_sharding_key)\n--\n\n"
"The encoded messages, whether one has keys, and whether one has a tag; None if they are\n"
"not for it.");

static PyObject *
encoder_encode(Encoder *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyLong_Check(args[1]) || !PyBool_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "encode takes messages, a number and a bool");
        return NULL;
    }
    Batch batch = {0};
    batch.max_body_bytes = PyLong_AsSsize_t(args[1]);
    if (batch.max_body_bytes == -1 && PyErr_Occurred())
        return NULL;
    if (!PyList_CheckExact(args[0]))
        Py_RETURN_NONE;
    Py_ssize_t size = batch_size(self, args[0], args[2] == Py_True, &batch);
    if (size < 0)
        Py_RETURN_NONE;
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (data == NULL)
        return NULL;
    unsigned char *begin = (unsigned char *)PyBytes_AS_STRING(data);
    unsigned char *at = put_array(begin, (size_t)PyList_GET_SIZE(args[0]));
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(args[0]); number++)
        at = put_message(self, at, PyList_GET_ITEM(args[0], number));
    assert(at == begin + size);
    PyObject *found = PyTuple_Pack(
        3, data, batch.has_keys ? Py_True : Py_False, batch.has_tags ? Py_True : Py_False);
    Py_DECREF(data);
    return found;
}

/* ---- The object -------------------------------------------------------------------------- */

static PyObject *
encoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"message_type", "limits", NULL};
    PyTypeObject *message_type;
    Limits limits;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O!(nnnnnnnnn):Encoder", names, &PyType_Type, &message_type,
            &limits.max_messages, &limits.max_raw_bytes, &limits.max_strings,
            &limits.max_topic_length, &limits.max_tag_length, &limits.max_keys,
            &limits.max_key_length, &limits.max_sharding_key_length, &limits.max_flag))
        return NULL;
    /* Headers of texts are written up to 16 bits, numbers up to 32; sizes must not overflow. */
    if (limits.max_topic_length > 65535 || limits.max_tag_length > 65535
            || limits.max_key_length > 65535 || limits.max_sharding_key_length > 65535
            || limits.max_flag > 0xffffffffL || limits.max_raw_bytes > 0xffffffffL
            || limits.max_messages > 0xffffffffL) {
        PyErr_SetString(PyExc_ValueError, "a limit is beyond what can be written");
        return NULL;
    }
    Encoder *self = (Encoder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->message_type = (PyTypeObject *)Py_NewRef(message_type);
    self->limits = limits;
    self->zero = PyLong_FromLong(0);
    if (self->zero == NULL || find_message_slots(message_type, &self->message) < 0) {
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
    Py_XDECREF(self->zero);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef encoder_methods[] = {
    {"encode", (PyCFunction)encoder_encode, METH_FASTCALL, encode_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot encoder_slots[] = {
    {Py_tp_doc, "Encodes plain messages; see mqmesh.fast_encode."},
    {Py_tp_new, encoder_new},
    {Py_tp_dealloc, encoder_dealloc},
    {Py_tp_methods, encoder_methods},
    {0, NULL},
};

static PyType_Spec encoder_spec = {
    .name = "mqmesh._fast_encode.Encoder",
    .basicsize = sizeof(Encoder),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = encoder_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&encoder_spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Encoder", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mqmesh._fast_encode",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__fast_encode(void)
{
    return PyModuleDef_Init(&module_def);
}
