/* What the modules in C know of messages: where the class keeps its fields, and which texts are
   surely legal. What is refused here is not illegal: it is left to Python, which can tell.

   Objects are read at the places where their classes have their slots. Those are asked for when a
   module's object is made; a class that keeps such an attribute otherwise is refused then. */

#ifndef MQMESH_PLAIN_MESSAGE_H
#define MQMESH_PLAIN_MESSAGE_H

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

static int
find_slot(PyTypeObject *type, const char *name, Py_ssize_t *place)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (found == NULL)
        return -1;
    int is_slot = Py_IS_TYPE(found, &PyMemberDescr_Type);
    if (is_slot) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        is_slot = member->type == T_OBJECT_EX && PyType_IsSubtype(type, PyDescr_TYPE(found));
        *place = member->offset;
    }
    Py_DECREF(found);
    if (!is_slot) {
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
        return -1;
    }
    return 0;
}

static int
find_message_slots(PyTypeObject *message, MessageSlots *slots)
{
    int failed = find_slot(message, "topic", &slots->topic)
        || find_slot(message, "body", &slots->body)
        || find_slot(message, "tag", &slots->tag)
        || find_slot(message, "keys", &slots->keys)
        || find_slot(message, "properties", &slots->properties)
        || find_slot(message, "flag", &slots->flag)
        || find_slot(message, "sharding_key", &slots->sharding_key)
        || find_slot(message, "delay_level", &slots->delay_level)
        || find_slot(message, "deliver_at_ms", &slots->deliver_at_ms);
    return failed ? -1 : 0;
}

/* The length of a text in ASCII, 1 to max_length, or -1. */
static inline Py_ssize_t
ascii_length(PyObject *text, Py_ssize_t max_length)
{
    if (text == NULL || !PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text))
        return -1;
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    return 0 < length && length <= max_length ? length : -1;
}

/* The same for a tag: no bar anywhere, and no white space at the ends, of which ASCII has some
   below the blank. */
static inline Py_ssize_t
tag_length(PyObject *tag, Py_ssize_t max_length)
{
    Py_ssize_t length = ascii_length(tag, max_length);
    if (length < 0)
        return -1;
    const char *text = (const char *)PyUnicode_1BYTE_DATA(tag);
    if (text[0] <= ' ' || text[length - 1] <= ' ' || memchr(text, '|', (size_t)length) != NULL)
        return -1;
    return length;
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

#endif
