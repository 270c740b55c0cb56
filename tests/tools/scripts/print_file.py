import os


def main(path):
    data = read(path)
    print(data)


def read(path):
    return open(path).read()


main("a")
