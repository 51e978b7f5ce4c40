/* Checks payloads before they are stored, and finds the keys in them; see payload_check.py.

   Nothing is made of what is read but a text now and then that is not ASCII. What is not surely
   legal is left to Python, which says what is wrong with it. */

#include "reading.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t max_strings;
    FieldLimits limits;
} Checker;

/* What the messages of a payload must be like. */
typedef struct {
    const char *topic;
    Py_ssize_t topic_size, max_body_bytes, strings;
} Wanted;

/* 0 for a message that is surely legal. */
static int
check_message(const Checker *self, Reading *reading, Wanted *wanted)
{
    const FieldLimits *limits = &self->limits;
    Py_ssize_t length = 0, bytes = 0;
    if (read_this(reading, 0x99) < 0)
        return -1;
    const unsigned char *topic = read_text(reading, &length);
    if (topic == NULL || length != wanted->topic_size
            || memcmp(topic, wanted->topic, (size_t)length) != 0)
        return -1;
    if (read_body(reading, &length) == NULL || length < 1 || length > wanted->max_body_bytes
            || skip_optional(reading, limits->tag) < 0)
        return -1;
    Py_ssize_t keys = skip_keys(reading, limits);
    Py_ssize_t properties = keys < 0 ? -1 : skip_properties(reading, limits, 1, &bytes);
    if (properties < 0 || bytes > limits->properties)
        return -1;
    wanted->strings += keys + 2 * properties;
    if (wanted->strings > self->max_strings || read_number(reading, limits->flag) < 0
            || skip_optional(reading, limits->sharding_key) < 0
            || read_number(reading, limits->flag) < 0
            || read_number(reading, limits->deliver_at_ms) < 0)
        return -1;
    return 0;
}

PyDoc_STRVAR(check_doc,
"check(payload, count, topic, max_body_bytes)\n--\n\n"
"True if so many messages of a topic are surely legal.");

static PyObject *
checker_check(Checker *self, PyObject *args)
{
    Py_buffer payload;
    Py_ssize_t count;
    Wanted wanted = {0};
    if (!PyArg_ParseTuple(args, "y*ns#n:check", &payload, &count, &wanted.topic,
                          &wanted.topic_size, &wanted.max_body_bytes))
        return NULL;
    const unsigned char *begin = payload.buf;
    Reading reading = {begin, begin + payload.len};
    int is_legal = count > 0 && read_array(&reading) == count;
    for (Py_ssize_t number = 0; is_legal && number < count; number++)
        is_legal = check_message(self, &reading, &wanted) == 0;
    is_legal = is_legal && reading.at == reading.end;
    PyBuffer_Release(&payload);
    return PyBool_FromLong(is_legal);
}

/* ---- Keys -------------------------------------------------------------------------------- */

/* The array of a message's keys as it stands there, and how many they are; -1 for what is no such
   message. */
static Py_ssize_t
find_keys(Reading *reading, Reading *keys)
{
    Py_ssize_t length = 0;
    if (read_this(reading, 0x99) < 0 || read_text(reading, &length) == NULL
            || read_body(reading, &length) == NULL
            || (read_this(reading, 0xc0) < 0 && read_text(reading, &length) == NULL))
        return -1;
    keys->at = reading->at;
    Py_ssize_t count = read_array(reading);
    if (count < 0)
        return -1;
    for (Py_ssize_t number = 0; number < count; number++)
        if (read_text(reading, &length) == NULL)
            return -1;
    keys->end = reading->at;
    Py_ssize_t properties = read_this(reading, 0xc0) == 0 ? 0 : read_map(reading);
    if (properties < 0)
        return -1;
    for (Py_ssize_t number = 0; number < properties; number++)
        if (read_text(reading, &length) == NULL || read_text(reading, &length) == NULL)
            return -1;
    if (read_number(reading, LLONG_MAX) < 0
            || (read_this(reading, 0xc0) < 0 && read_text(reading, &length) == NULL)
            || read_number(reading, LLONG_MAX) < 0 || read_number(reading, LLONG_MAX) < 0)
        return -1;
    return count;
}

PyDoc_STRVAR(keys_doc,
"keys(payload, count)\n--\n\n"
"The arrays of keys of so many messages, one behind the other, without the empty ones, and how\n"
"many they are; None where they must be decoded, or are more than a batch may have.");

static PyObject *
checker_keys(Checker *self, PyObject *args)
{
    Py_buffer payload;
    Py_ssize_t count, found = 0, size = 0, strings = 0;
    if (!PyArg_ParseTuple(args, "y*n:keys", &payload, &count))
        return NULL;
    const unsigned char *begin = payload.buf;
    Reading reading = {begin, begin + payload.len}, keys;
    PyObject *data = PyBytes_FromStringAndSize(NULL, payload.len), *result = NULL;
    int is_one = data != NULL && count > 0 && read_array(&reading) == count;
    for (Py_ssize_t number = 0; is_one && number < count; number++) {
        Py_ssize_t own = find_keys(&reading, &keys);
        strings += own;
        is_one = own >= 0 && strings <= self->max_strings;
        if (is_one && own > 0) {
            memcpy(PyBytes_AS_STRING(data) + size, keys.at, (size_t)(keys.end - keys.at));
            size += keys.end - keys.at;
            found++;
        }
    }
    if (is_one && reading.at == reading.end && _PyBytes_Resize(&data, size) == 0)
        result = Py_BuildValue("On", data, found);
    else if (!PyErr_Occurred())
        result = Py_NewRef(Py_None);
    Py_XDECREF(data);
    PyBuffer_Release(&payload);
    return result;
}

/* ---- The object -------------------------------------------------------------------------- */

static PyObject *
checker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"max_strings", "field_limits", NULL};
    Py_ssize_t max_strings;
    FieldLimits limits;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$n(nnnnnnn):Checker", names, &max_strings, &limits.tag,
            &limits.keys, &limits.key, &limits.sharding_key, &limits.properties, &limits.flag,
            &limits.deliver_at_ms))
        return NULL;
    Checker *self = (Checker *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->max_strings = max_strings;
    self->limits = limits;
    return (PyObject *)self;
}

static void
checker_dealloc(Checker *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef checker_methods[] = {
    {"check", (PyCFunction)checker_check, METH_VARARGS, check_doc},
    {"keys", (PyCFunction)checker_keys, METH_VARARGS, keys_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot checker_slots[] = {
    {Py_tp_doc, "Checks payloads; see mqmesh.batch.payload_check."},
    {Py_tp_new, checker_new},
    {Py_tp_dealloc, checker_dealloc},
    {Py_tp_methods, checker_methods},
    {0, NULL},
};

PyType_Spec mq_checker_spec = {
    .name = "mqmesh._native.Checker",
    .basicsize = sizeof(Checker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = checker_slots,
};
