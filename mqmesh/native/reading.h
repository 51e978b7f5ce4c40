/* Reading msgpack that comes from anywhere. Nothing is believed of a length but that so many bytes
   are there. Each function gives -1 or NULL where something is otherwise than it should be, and the
   place is undefined then. */

#ifndef MQMESH_READING_H
#define MQMESH_READING_H

#include "slots.h"

typedef struct {
    const unsigned char *at, *end;
} Reading;

/* A number of so many bytes (up to 4), big endian. */
static inline Py_ssize_t
read_width(Reading *reading, int width)
{
    if (reading->end - reading->at < width)
        return -1;
    Py_ssize_t number = 0;
    for (int byte = 0; byte < width; byte++)
        number = number << 8 | *reading->at++;
    return number;
}

/* The code of what comes next, 0 to 255. */
static inline int
read_code(Reading *reading)
{
    return reading->at == reading->end ? -1 : *reading->at++;
}

/* 0 if the next byte is this one, which is passed over then. */
static inline int
read_this(Reading *reading, unsigned char wanted)
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
    int code = read_code(reading);
    *length = (code & 0xe0) == 0xa0 ? code & 0x1f
        : code == 0xd9 ? read_width(reading, 1)
        : code == 0xda ? read_width(reading, 2)
        : code == 0xdb ? read_width(reading, 4) : -1;
    return code < 0 ? NULL : read_bytes(reading, *length);
}

static inline const unsigned char *
read_body(Reading *reading, Py_ssize_t *length)
{
    int code = read_code(reading);
    *length = code == 0xc4 ? read_width(reading, 1)
        : code == 0xc5 ? read_width(reading, 2)
        : code == 0xc6 ? read_width(reading, 4) : -1;
    return read_bytes(reading, *length);
}

/* The elements of an array (short form 0x90, long ones from 0xdc on) or of a map (0x80, 0xde). */
static inline Py_ssize_t
read_count(Reading *reading, int short_code, int long_code)
{
    int code = read_code(reading);
    if (code < 0)
        return -1;
    if ((code & 0xf0) == short_code)
        return code & 0x0f;
    return code == long_code ? read_width(reading, 2)
        : code == long_code + 1 ? read_width(reading, 4) : -1;
}

static inline Py_ssize_t
read_array(Reading *reading)
{
    return read_count(reading, 0x90, 0xdc);
}

static inline Py_ssize_t
read_map(Reading *reading)
{
    return read_count(reading, 0x80, 0xde);
}

/* A whole number from 0 to a limit. */
static inline long long
read_number(Reading *reading, long long limit)
{
    int code = read_code(reading);
    long long number = code < 0x80 ? code
        : code == 0xcc ? read_width(reading, 1)
        : code == 0xcd ? read_width(reading, 2)
        : code == 0xce ? read_width(reading, 4) : -1;
    if (code == 0xcf) {
        Py_ssize_t high = read_width(reading, 4), low = read_width(reading, 4);
        number = high < 0 || low < 0 || high > 0x7fffffff ? -1 : (long long)high << 32 | low;
    }
    return number > limit ? -1 : number;
}

static inline int
is_ascii(const unsigned char *text, Py_ssize_t length)
{
    Py_ssize_t place = 0;
    for (; place + 8 <= length; place += 8) {
        unsigned long long eight;
        memcpy(&eight, text + place, 8);
        if (eight & 0x8080808080808080ULL)
            return 0;
    }
    for (; place < length; place++)
        if (text[place] >= 0x80)
            return 0;
    return 1;
}

/* A text as an object; NULL, without an error unless memory is short, for what is no UTF-8. */
static inline PyObject *
make_text(const unsigned char *text, Py_ssize_t length)
{
    if (is_ascii(text, length)) {
        PyObject *made = PyUnicode_New(length, 127);
        if (made != NULL)
            memcpy(PyUnicode_1BYTE_DATA(made), text, (size_t)length);
        return made;
    }
    PyObject *made = PyUnicode_DecodeUTF8((const char *)text, length, NULL);
    if (made == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        PyErr_Clear();
    return made;
}

/* How many characters a text has; -1 for what is no UTF-8. */
static inline Py_ssize_t
count_characters(const unsigned char *text, Py_ssize_t length)
{
    if (is_ascii(text, length))
        return length;
    PyObject *made = make_text(text, length);
    Py_ssize_t count = made == NULL ? -1 : PyUnicode_GET_LENGTH(made);
    Py_XDECREF(made);
    PyErr_Clear();
    return count;
}

/* Passes over a text of so many characters at most; how many bytes it has, or -1. */
static inline Py_ssize_t
skip_text(Reading *reading, Py_ssize_t min_characters, Py_ssize_t max_characters)
{
    Py_ssize_t length = 0;
    const unsigned char *text = read_text(reading, &length);
    if (text == NULL)
        return -1;
    Py_ssize_t characters = count_characters(text, length);
    return min_characters <= characters && characters <= max_characters ? length : -1;
}

/* 0 for nothing or a text of 1 to so many characters. */
static inline int
skip_optional(Reading *reading, Py_ssize_t max_characters)
{
    if (read_this(reading, 0xc0) == 0)
        return 0;
    return skip_text(reading, 1, max_characters) < 0 ? -1 : 0;
}

/* How many keys are passed over. */
static inline Py_ssize_t
skip_keys(Reading *reading, const FieldLimits *limits)
{
    Py_ssize_t count = read_array(reading);
    if (count < 0 || count > limits->keys)
        return -1;
    for (Py_ssize_t number = 0; number < count; number++)
        if (skip_text(reading, 1, limits->key) < 0)
            return -1;
    return count;
}

/* How many properties are passed over, with names of so many characters at least; they take so
   many bytes together. */
static inline Py_ssize_t
skip_properties(Reading *reading, const FieldLimits *limits, int min_name, Py_ssize_t *bytes)
{
    *bytes = 0;
    if (read_this(reading, 0xc0) == 0)
        return 0;
    Py_ssize_t count = read_map(reading);
    /* Each takes two bytes at least: a count that cannot be true is not counted through. */
    if (count < 0 || count > (reading->end - reading->at) / 2)
        return -1;
    for (Py_ssize_t number = 0; number < count; number++) {
        Py_ssize_t name = skip_text(reading, min_name, limits->properties);
        Py_ssize_t value = name < 0 ? -1 : skip_text(reading, 0, limits->properties);
        if (value < 0)
            return -1;
        *bytes += name + value;
    }
    return count;
}

#endif
