/* What the parts in C know of classes and texts.

   Objects are read at the places where their classes have their slots. Those are asked for when a
   part's object is made; a class that keeps such an attribute otherwise is refused then. What is
   refused of a message here is not illegal: it is left to Python, which can tell. */

#ifndef MQMESH_SLOTS_H
#define MQMESH_SLOTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "what follows relies on the interpreter's lock; Python does it without this part"
#endif

/* What an object has at the place of a slot; borrowed, NULL when it was deleted. */
#define SLOT(object, place) (*(PyObject **)((char *)(object) + (place)))

typedef struct {
    Py_ssize_t topic, body, tag, keys, properties, flag, sharding_key, delay_level, deliver_at_ms;
} MessageSlots;

/* Longest texts of a message, in characters but for properties, which count together as UTF-8. */
typedef struct {
    Py_ssize_t tag, keys, key, sharding_key, properties, flag, deliver_at_ms;
} FieldLimits;

int mq_find_slot(PyTypeObject *type, const char *name, Py_ssize_t *place);
int mq_find_message_slots(PyTypeObject *message, MessageSlots *slots);

/* The types of this module, each in a file of its own. */
extern PyType_Spec mq_encoder_spec, mq_decoder_spec, mq_field_spec, mq_property_spec,
    mq_checker_spec, mq_open_batch_spec, mq_admission_spec;

/* ---- Texts of messages: their bytes as UTF-8, or NULL where only Python can tell ------------- */

static inline const char *
utf8_of(PyObject *text, Py_ssize_t *size)
{
    if (text == NULL || !PyUnicode_CheckExact(text) || !PyUnicode_IS_READY(text))
        return NULL;
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        *size = PyUnicode_GET_LENGTH(text);
        return (const char *)PyUnicode_1BYTE_DATA(text);
    }
    const char *found = PyUnicode_AsUTF8AndSize(text, size);
    if (found == NULL)
        PyErr_Clear(); /* half of a pair of surrogates, or no memory */
    return found;
}

/* The bytes that a text of 1 to so many characters takes, or -1. */
static inline Py_ssize_t
text_bytes(PyObject *text, Py_ssize_t max_characters)
{
    Py_ssize_t size;
    if (utf8_of(text, &size) == NULL)
        return -1;
    Py_ssize_t characters = PyUnicode_GET_LENGTH(text);
    return 0 < characters && characters <= max_characters ? size : -1;
}

/* The same of a tag: no bar anywhere, and no white space at its ends. */
static inline Py_ssize_t
tag_bytes(PyObject *tag, Py_ssize_t max_characters)
{
    Py_ssize_t size = text_bytes(tag, max_characters);
    if (size < 0)
        return -1;
    Py_UCS4 first = PyUnicode_READ_CHAR(tag, 0);
    Py_UCS4 last = PyUnicode_READ_CHAR(tag, PyUnicode_GET_LENGTH(tag) - 1);
    if (first <= ' ' || last <= ' ' || Py_UNICODE_ISSPACE(first) || Py_UNICODE_ISSPACE(last))
        return -1;
    const char *text = utf8_of(tag, &size);
    return memchr(text, '|', (size_t)size) == NULL ? size : -1;
}

/* The bytes of names and values that a user may set; -1 for anything else, also for names that are
   reserved (a frozenset; NULL for none). */
static inline Py_ssize_t
properties_bytes(PyObject *properties, PyObject *reserved, Py_ssize_t max_bytes)
{
    if (properties == NULL || !PyDict_CheckExact(properties))
        return -1;
    Py_ssize_t place = 0, name_bytes, value_bytes, bytes = 0;
    PyObject *name, *value;
    while (PyDict_Next(properties, &place, &name, &value)) {
        if (utf8_of(name, &name_bytes) == NULL || utf8_of(value, &value_bytes) == NULL
                || name_bytes < 1 || (reserved != NULL && PySet_Contains(reserved, name)))
            return -1;
        bytes += name_bytes + value_bytes;
        if (bytes > max_bytes)
            return -1;
    }
    return bytes;
}

/* How many keys, or -1 for what is neither tuple nor list, or too many. */
static inline Py_ssize_t
key_count(PyObject *keys, Py_ssize_t max_keys)
{
    if (keys == NULL || !(PyTuple_CheckExact(keys) || PyList_CheckExact(keys)))
        return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    return count <= max_keys ? count : -1;
}

/* A whole number from 0 to a limit, or -1 with no error set; True is none. */
static inline long long
number_of(PyObject *number, long long limit)
{
    if (number == NULL || !PyLong_CheckExact(number))
        return -1;
    int overflow;
    long long found = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow || found < 0 || found > limit ? -1 : found;
}

static inline int
same_text(PyObject *text, PyObject *other)
{
    if (text == other)
        return 1;
    Py_ssize_t size, other_size;
    const char *bytes = utf8_of(text, &size), *other_bytes = utf8_of(other, &other_size);
    return bytes != NULL && other_bytes != NULL && size == other_size
        && memcmp(bytes, other_bytes, (size_t)size) == 0;
}

#endif
